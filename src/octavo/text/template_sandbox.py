"""Jinja2's immutable sandbox with the settings chat templates are written for, and bounds on what it may
multiply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_REPEATED = 1 << 20
"""Elements that `"=" * n` may make; the longest seen in a published template is 80."""


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of transformers' `apply_chat_template`, for templates nobody here has read."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
        )

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse what could fill memory in one step. Raises SecurityError."""
        if operator == "**":
            raise jinja2.exceptions.SecurityError("the chat template uses powers, which are not allowed")
        for many, times in ((left, right), (right, left)):
            if (
                isinstance(many, str | list | tuple)
                and isinstance(times, int)
                and len(many) * times > MAX_REPEATED
            ):
                raise jinja2.exceptions.SecurityError(
                    f"the chat template makes {len(many) * times} elements by repetition; "
                    f"the limit is {MAX_REPEATED}"
                )
        return super().call_binop(context, operator, left, right)


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks what training learns; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block's body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call: Callable[..., jinja2.nodes.Call] = self.call_method
        return jinja2.nodes.CallBlock(call("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()

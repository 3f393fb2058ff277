"""`octavo chat`: talk to a model in the terminal, in this process or at a server."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.flags import MODEL_FIELDS, count, in_flags
from octavo.cli.interrupts import interrupts_raise

if TYPE_CHECKING:
    from octavo.cli.chat_answers import AnswerSource, Message
    from octavo.cli.chat_terminal import Room

_SAMPLING_FIELDS = ("temperature", "top_p", "max_tokens", "seed")
"""Fields of `SamplingParams` that are flags here."""

HELP = """\
/reset           forget the conversation
/system TEXT     set the system message and begin anew; without TEXT: show it
/help            this list
Ctrl-C           stop an answer; what came so far stays in the conversation
Ctrl-D           leave
A pasted text of many lines is one message. A message that begins with / needs a space before it."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "chat",
        usage="octavo chat [MODEL] [OPTIONS]",
        help="talk to a model in the terminal",
        description="Talk to a model in the terminal. Where standard input is no terminal, each of its lines "
        "is a turn and answers are plain text.",
    )
    flag = parser.add_argument
    flag(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a GGUF file, or a name that 'octavo pull' knows (default: smollm2-135m); with --url, a model's "
        "name there",
    )
    flag("--url", help="talk to a running server, for example http://127.0.0.1:8000/v1")
    flag("--api-key", metavar="KEY", help="the key that the server asks for (default: $OCTAVO_API_KEY)")
    flag("--system", metavar="TEXT", help="the system message: how the model should answer")
    flag(
        "--temperature",
        type=float,
        metavar="T",
        help="0 always picks the likeliest token, more varies the answers (default: 1)",
    )
    flag(
        "--top-p", type=float, metavar="P", help="draw from the likeliest tokens that reach this probability"
    )
    flag("--max-tokens", type=count, metavar="N", help="longest answer, in tokens (default: what fits)")
    flag("--seed", type=int, metavar="N", help="the same N gives the same answers")
    flag("--threads", type=count, metavar="N", help="threads that compute (default: performance cores)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns: 0 at the end of the conversation, 1 if it could not begin or a piped turn failed, 2 for flags
    that exclude each other.
    """
    from octavo.cli.chat_answers import ChatError
    from octavo.cli.chat_terminal import PipeRoom, TerminalRoom

    if args.url is not None and args.threads is not None:
        print("octavo: error: --threads is for a model in this process, not with --url", file=sys.stderr)
        return 2
    if args.url is None and args.api_key is not None:
        print("octavo: error: --api-key is for a server, with --url", file=sys.stderr)
        return 2
    room: Room = TerminalRoom() if sys.stdin.isatty() and sys.stdout.isatty() else PipeRoom()
    try:
        source = _remote(args) if args.url is not None else _local(args, room)
    except ChatError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 1
    try:
        room.say(f"{source.name}. /help lists what else there is; Ctrl-D leaves.")
        with interrupts_raise():  # Ctrl-C stops an answer, not the conversation
            return Conversation(source, room, system=args.system).hold()
    except BrokenPipeError:
        # The reader of our output has left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        source.close()


class Conversation:
    """What has been said, and what is said next.

    An answer that was stopped stays, as far as it came; a turn that got no answer is taken back.
    """

    def __init__(self, source: AnswerSource, room: Room, *, system: str | None = None) -> None:
        self._source = source
        self._room = room
        self._system = system
        self._messages: list[Message] = []

    def hold(self) -> int:
        """Take turns until there are no more. Returns 1 once a turn from a pipe fails."""
        for text in self._room.turns():
            if self._room.takes_commands and text.startswith("/"):
                self._command(text)
            elif not self._take_turn(text.strip()) and not self._room.takes_commands:
                return 1
        return 0

    def _take_turn(self, text: str) -> bool:
        from octavo.cli.chat_answers import ChatError

        messages = [*self._messages, {"role": "user", "content": text}]
        said: list[str] = []
        try:
            self._stream(messages, said)
        except ChatError as error:
            if said:
                self._room.end_of_answer()
            self._room.complain(_with_advice(str(error), self._messages))
            return False
        except KeyboardInterrupt:
            if not self._room.takes_commands:
                raise
            self._room.end_of_answer()
            self._room.remark("stopped")
            if not said:
                return False
        self._messages = [*messages, {"role": "assistant", "content": "".join(said)}]
        return True

    def _stream(self, messages: Sequence[Message], said: list[str]) -> None:
        """Show an answer while it comes; its pieces go to `said`. Raises ChatError, KeyboardInterrupt."""
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        with self._source.ask([*system, *messages]) as answer:
            for piece in answer:
                if piece:
                    said.append(piece)
                    self._room.piece(piece)
            cut = answer.finish_reason == "length"
            numbers = answer.numbers()
        self._room.end_of_answer()
        if cut:
            self._room.remark("the answer reached its limit of tokens")
        self._room.show(numbers)

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/help":
            self._room.say(HELP)
        elif name == "/reset":
            self._messages = []
            self._room.say("The conversation is forgotten.")
        elif name == "/system" and rest.strip():
            self._system, self._messages = rest.strip(), []
            self._room.say("The system message is set; the conversation begins anew.")
        elif name == "/system":
            self._room.say(
                self._system or "There is no system message (the model's template may have its own)."
            )
        else:
            self._room.complain(f"There is no command {name}; /help lists them.")


def _with_advice(sentence: str, earlier: Sequence[Message]) -> str:
    return f"{sentence} (/reset begins anew)" if earlier and "longest request" in sentence else sentence


def _remote(args: argparse.Namespace) -> AnswerSource:
    from octavo.cli.chat_remote import RemoteSource

    key = args.api_key if args.api_key is not None else os.environ.get("OCTAVO_API_KEY")
    return RemoteSource(args.url, model=args.model, api_key=key, options=_options(args))


def _local(args: argparse.Namespace, room: Room) -> AnswerSource:
    from octavo.cli.chat_answers import ChatError, LocalSource
    from octavo.engine.sampling_params import InvalidParameter, SamplingParams

    model = args.model or "smollm2-135m"
    try:
        params = SamplingParams(**_options(args))
    except InvalidParameter as error:
        raise ChatError(in_flags(error.message, _SAMPLING_FIELDS)) from error
    room.say(f"loading {model} ...")
    from octavo.llm import LLM
    from octavo.model.available_memory import MemoryRefused
    from octavo.model.errors import ModelFileError
    from octavo.text.chat_template import ChatTemplateError

    try:
        llm = LLM(model, threads=args.threads)
    except ValueError as error:
        raise ChatError(in_flags(str(error), MODEL_FIELDS)) from error
    except (ModelFileError, MemoryRefused, ChatTemplateError) as error:
        raise ChatError(str(error)) from error
    return LocalSource(llm, params, Path(model).name.removesuffix(".gguf"))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given, by the names both engine and server know."""
    return {name: getattr(args, name) for name in _SAMPLING_FIELDS if getattr(args, name) is not None}

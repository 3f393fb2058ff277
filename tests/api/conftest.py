"""The API over a scripted engine, spoken to through real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from api.scripted_engine import Script, ScriptedEngine
from octavo.api.app import create_app
from octavo.api.keys import Key, Keyring
from octavo.api.listener import base_url, listen
from octavo.model.gguf import GGUFFile
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer

MODEL_ID = "tiny"


@pytest.fixture(scope="session")
def tiny_metadata(tiny_model_path: Path) -> Iterator[dict[str, Any]]:
    with GGUFFile(tiny_model_path) as file:
        yield file.metadata


@pytest.fixture(scope="session")
def tokenizer(tiny_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(tiny_metadata)


@pytest.fixture(scope="session")
def chat_template(tiny_metadata: dict[str, Any]) -> ChatTemplate:
    template = ChatTemplate.from_gguf(tiny_metadata)
    assert template is not None
    return template


@contextmanager
def serving(app: Starlette) -> Iterator[httpx.Client]:
    """A client of `app`, served by uvicorn in a thread on a free port."""
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        with httpx.Client(base_url=base_url(listener), timeout=20) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def of_api_key(key: str) -> Keyring:
    """What `--api-key KEY` makes."""
    return Keyring(flag_key=Key.of_flag(key))


@pytest.fixture(scope="session")
def shared_server(
    tokenizer: Tokenizer, chat_template: ChatTemplate
) -> Iterator[tuple[httpx.Client, ScriptedEngine]]:
    engine = ScriptedEngine()
    with serving(create_app(cast(Any, engine), tokenizer, chat_template, MODEL_ID)) as client:
        yield client, engine


@pytest.fixture
def scripted(
    shared_server: tuple[httpx.Client, ScriptedEngine], tokenizer: Tokenizer, chat_template: ChatTemplate
) -> Iterator[Callable[..., tuple[httpx.Client, ScriptedEngine]]]:
    """`scripted(script, longest_request=256)`: a client and the engine behind it.

    `script` is one for all choices, or a function of the choice's index. Options of `create_app`,
    `with_template=False` or `fresh=True` start a server of their own; otherwise tests share one.
    """
    with ExitStack() as servers:

        def make(
            script: Script | Callable[[int], Script],
            *,
            longest_request: int = 256,
            with_template: bool = True,
            fresh: bool = False,
            **options: Any,
        ) -> tuple[httpx.Client, ScriptedEngine]:
            client, engine = shared_server
            if options or fresh or not with_template:
                engine = ScriptedEngine()
                template = chat_template if with_template else None
                app = create_app(cast(Any, engine), tokenizer, template, MODEL_ID, **options)
                client = servers.enter_context(serving(app))
            engine.reset(script if callable(script) else lambda _: script, longest_request)
            return client, engine

        yield make

"""`octavo serve`: one model over HTTP.

    flags -> take the port -> load the model (the web stack is imported meanwhile) -> arithmetic -> serve

Whatever is wrong with the flags, the port, the file or the memory is one sentence on standard error and exit
code 1.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.config_file import ConfigFile, PinnedPrefix, default_path, is_there
from octavo.cli.config_place import BadConfig
from octavo.cli.flags import MODEL_FIELDS, byte_count, count, in_flags, milliseconds, whole
from octavo.cli.settling_heap import SettlingHeap

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from octavo.engine.engine import Engine
    from octavo.engine.memory import MemoryPlan
    from octavo.model.model import Model
    from octavo.text.chat_template import ChatTemplate
    from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo.serve")

ENVIRONMENT_PREFIX = "OCTAVO_"

_ENGINE_FIELDS = (
    "max_model_len",
    "kv_cache_memory",
    "kv_cache_dtype",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_queued_reqs",
    "scheduling_policy",
    "target_itl_ms",
)
"""Fields of `EngineConfig` that are flags here."""

_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from octavo.engine.config import EngineConfig
    from octavo.engine.memory import DEFAULT_POOL_CAP
    from octavo.model.available_memory import GIB

    defaults = EngineConfig()
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="octavo serve [MODEL] [OPTIONS]",
        description="Serve a model over HTTP, with OpenAI's API.",
        epilog="Every option can also be set in the environment: --max-num-seqs as OCTAVO_MAX_NUM_SEQS. "
        "Sizes in tokens and bytes are printed at the start, with the arithmetic.",
    )
    flag = parser.add_argument
    flag(
        "model",
        metavar="MODEL",
        nargs="?",
        default="smollm2-135m",
        help="a GGUF file, or a name that 'octavo pull' knows (default: %(default)s)",
    )
    flag("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    flag(
        "--port", type=_port, default=8000, help="port to listen on, 0 for a free one (default: %(default)s)"
    )
    flag(
        "--served-model-name",
        metavar="NAME",
        help="what clients call the model (default: MODEL, without folders and .gguf)",
    )
    flag(
        "--max-model-len",
        type=count,
        metavar="TOKENS",
        help="longest request, prompt and answer together (default: the model's context)",
    )
    flag(
        "--kv-cache-memory",
        type=byte_count,
        metavar="SIZE",
        help="memory for the tokens of all requests: 2GiB, 512MiB, or bytes (default: half of what is "
        f"available, at most {DEFAULT_POOL_CAP // GIB} GiB)",
    )
    flag(
        "--kv-cache-dtype",
        choices=("f16", "q8"),
        default=defaults.kv_cache_dtype,
        help="how tokens are stored there: q8 takes little more than half of the bytes, and answers may "
        "differ from those of f16 (default: %(default)s)",
    )
    flag(
        "--block-size",
        type=int,
        choices=(8, 16, 32),
        default=defaults.block_size,
        help="tokens that share a block of this memory (default: %(default)s)",
    )
    flag(
        "--max-num-seqs",
        type=count,
        metavar="N",
        help=f"requests computed together; more of them wait (default: {defaults.max_num_seqs})",
    )
    flag(
        "--max-num-batched-tokens",
        type=count,
        metavar="N",
        help=f"tokens computed in one step, of all requests (default: {defaults.max_num_batched_tokens})",
    )
    flag(
        "--max-num-queued-reqs",
        type=whole,
        metavar="N",
        help="requests that may wait beside those; one more gets a 503 that says when to come back "
        f"(default: {defaults.max_num_queued_reqs})",
    )
    flag(
        "--scheduling-policy",
        choices=("fair", "fcfs", "priority"),
        default=defaults.scheduling_policy,
        help="who comes first: users in turn by what was computed for each, who came first, or the lowest "
        "'priority' (default: %(default)s)",
    )
    flag(
        "--target-itl-ms",
        type=milliseconds,
        metavar="MS",
        help="how long a step may take while somebody streams: how far apart tokens come while prompts are "
        "read (default: 50, or twice what the streams take alone)",
    )
    flag(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=defaults.enable_prefix_caching,
        help="compute the equal beginnings of prompts only once (default: yes)",
    )
    flag(
        "--shared-prefix-attention",
        action=argparse.BooleanOptionalAction,
        default=defaults.shared_prefix_attention,
        help="read what requests have in common once a step; answers are the same bytes (default: yes)",
    )
    flag(
        "--instruction-set",
        metavar="NAME",
        help="kernels to use: avx512vnni, avxvnni, avx2, sse41, neon or portable "
        "(default: the best that runs here)",
    )
    flag(
        "--config",
        type=Path,
        metavar="FILE",
        help="what is too long for flags, as TOML: API keys (docs/keys.md), prefixes that are never given up "
        "(docs/kv-cache.md); default: ~/.config/octavo/octavo.toml or below $XDG_CONFIG_HOME, if it is there",
    )
    flag("--threads", type=count, metavar="N", help="threads that compute (default: performance cores)")
    flag(
        "--api-key",
        type=_key,
        metavar="KEY",
        help="ask every client for a key: this one, beside those of the configuration, and it is an admin's "
        "(OCTAVO_API_KEY keeps it out of the list of processes)",
    )
    flag(
        "--strict",
        action="store_true",
        help="refuse to start where the memory cannot hold the longest request",
    )
    flag("--log-content", action="store_true", help="let the log hold prompts and answers")
    parser.set_defaults(run=run, problems=_apply_environment(parser, os.environ))


def run(args: argparse.Namespace) -> int:
    """Returns: 0 after SIGINT or SIGTERM, 1 where it could not start, 2 for a bad environment variable."""
    from octavo.api.listener import CannotListen, listen
    from octavo.model.errors import ModelFileError

    if args.problems:
        print(f"octavo: error: {args.problems[0]}", file=sys.stderr)
        return 2
    try:
        listener = listen(args.host, args.port)
    except CannotListen as error:
        return _refuse(str(error))
    # The web stack takes as long to import as the model to load, and most of loading needs no interpreter.
    threading.Thread(target=_import_web_stack, daemon=True).start()
    with listener, SettlingHeap() as heap:
        _set_up_logging()
        try:
            loaded = Loaded(args)
        except CannotServe as error:
            return _refuse(str(error))
        except ModelFileError as error:
            said = str(error)
            return _refuse(said if Path(args.model).name in said else f"{args.model}: {said}")
        with loaded:
            return _serve(args, loaded, listener, heap)


def _serve(args: argparse.Namespace, loaded: Loaded, listener: Any, heap: SettlingHeap) -> int:
    from octavo.api.app import create_app
    from octavo.api.listener import base_url
    from octavo.api.server import Server

    app: Starlette = create_app(
        loaded.engine,
        loaded.tokenizer,
        loaded.chat_template,
        loaded.name,
        keyring=loaded.keyring,
        log_content=args.log_content,
    )
    url = base_url(listener)
    say = _Speaker()
    say.heading(f"octavo serves {loaded.name}")
    say.lines([*loaded.engine.memory.describe(), loaded.described_keys()])
    if loaded.shortfall:
        say.warning(loaded.shortfall)
    if loaded.keyring.keyed and not loaded.keyring.live:
        say.warning(f"{loaded.config_path} has an empty list of keys: nobody gets in; octavo keys add NAME")
    elif not loaded.keyring.keyed and args.host not in ("127.0.0.1", "::1", "localhost"):
        say.warning(
            f"anyone who reaches {args.host} can use this server; 'octavo keys add NAME' asks for keys"
        )

    def on_ready() -> None:
        heap.settle()
        say.lines(_how_to_talk(url, loaded, keyed=loaded.keyring.keyed))
        say.heading(f"ready after {_seconds_since_command():.2f} s at {url}")

    if loaded.quota_bytes > loaded.engine.memory.pool_bytes:
        say.warning(
            f"the KV quotas of the keys are {loaded.quota_bytes:,} bytes together, and the pool has "
            f"{loaded.engine.memory.pool_bytes:,}: they are not all to be had at once"
        )
    loaded.engine.start()
    try:
        say.lines(loaded.pin_prefixes())
    except CannotServe as error:
        return _refuse(str(error))
    Server(app, loaded.engine, on_ready=on_ready).serve_on(listener)
    return 0


class CannotServe(Exception):
    """One sentence: what keeps the server from starting."""


class Loaded:
    """A model, its text side and an engine over it. Closes engine and model when left.

    shortfall: how the pool is shorter than what could be asked, in a sentence; None where it is not.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises ModelFileError, CannotServe."""
        from octavo.api.keys import Key, Keyring
        from octavo.cli.watched_keys import WatchedKeys
        from octavo.model.catalog import resolve_model
        from octavo.text.chat_template import ChatTemplate, ChatTemplateError
        from octavo.text.tokenizer import Tokenizer

        self.config_path: Path = args.config if args.config is not None else default_path()
        flag_key = Key.of_flag(args.api_key) if args.api_key is not None else None
        try:
            named = args.config is not None or is_there(self.config_path)
            self.config = ConfigFile.read(self.config_path) if named else ConfigFile()
            self._file = WatchedKeys(self.config_path, () if flag_key is None else (flag_key,))
        except BadConfig as error:
            raise CannotServe(str(error)) from error
        self.keyring = Keyring(self._file, flag_key=flag_key)
        self.name: str = args.served_model_name or Path(args.model).name.removesuffix(".gguf")
        self.model = _load_model(resolve_model(args.model), args.threads, args.instruction_set)
        try:
            self.tokenizer = Tokenizer.from_gguf(self.model.metadata)
            self.chat_template: ChatTemplate | None = None
            try:
                self.chat_template = ChatTemplate.from_gguf(self.model.metadata)
            except ChatTemplateError as error:
                logger.warning("serving completions only: %s", error)
            self.model.drop_metadata()
            self.engine = _make_engine(args, self.model, self.tokenizer, self.name)
            self.shortfall = _shortfall(self.engine.memory)
            if self.shortfall is not None and args.strict:
                self.engine.close()
                raise CannotServe(self.shortfall)
        except BaseException:
            self.model.close()
            raise

    @property
    def quota_bytes(self) -> int:
        """Of all keys together."""
        return sum(live.settings.kv_quota or 0 for live in self.keyring.live)

    def described_keys(self) -> str:
        """A line: how many keys are asked for, and which file they are from."""
        if self._file.keys is None:
            of_file = f"none in {self.config_path}" if is_there(self.config_path) else ""
        else:
            of_file = f"{len(self._file.keys):,} of {self.config_path}"
        of_flag = "that of --api-key" if len(self.keyring.live) > len(self._file.keys or ()) else ""
        asked = ", ".join(part for part in (of_file, of_flag) if part)
        return (
            f"API keys         {asked or 'none'}{'' if self.keyring.keyed else ': nobody is asked for one'}"
        )

    def pin_prefixes(self) -> list[str]:
        """Compute and hold the prefixes of the configuration. Returns: what is held, a line each.

        Raises: CannotServe.
        """
        from octavo.engine.request import RequestFailed, RequestRefused

        lines = []
        for number, prefix in enumerate(self.config.pinned_prefixes):
            place = f"kv-cache.pinned-prefixes[{number}]"
            try:
                token_ids = self._prefix_tokens(prefix)
                num_held = self.engine.pin_prefix(token_ids, cache_salt=prefix.cache_salt)
            except (RequestRefused, RequestFailed, ValueError) as error:
                raise CannotServe(f"{place} cannot be pinned: {error}") from error
            lines.append(f"pinned           {num_held:,} of {len(token_ids):,} tokens of {place}")
        return lines

    def _prefix_tokens(self, prefix: PinnedPrefix) -> list[int]:
        if not prefix.system:
            return self.tokenizer.encode(prefix.text, add_special=True, parse_special=True)
        if self.chat_template is None:
            raise ValueError("the model has no chat template, so no chat begins with it")
        # What two chats that go on differently have in common.
        begun = [
            self.tokenizer.encode(
                self.chat_template.render(
                    [{"role": "system", "content": prefix.text}, {"role": "user", "content": question}]
                ),
                add_special=False,
                parse_special=True,
            )
            for question in ("a", "1")
        ]
        shared = next((i for i, (a, b) in enumerate(zip(*begun, strict=False)) if a != b), 0)
        return begun[0][:shared]

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.model.close()


def _load_model(path: Path, num_threads: int | None, instruction_set: str | None) -> Model:
    from octavo.model.available_memory import MemoryRefused
    from octavo.model.model import Model

    try:
        return Model.load(path, num_threads=num_threads, instruction_set=instruction_set)
    except (MemoryRefused, ValueError, OSError) as error:
        raise CannotServe(in_flags(str(error), MODEL_FIELDS)) from error


def _make_engine(args: argparse.Namespace, model: Model, tokenizer: Tokenizer, name: str) -> Engine:
    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Engine
    from octavo.model.available_memory import MemoryRefused

    given = {field: getattr(args, field) for field in _ENGINE_FIELDS if getattr(args, field) is not None}
    try:
        config = EngineConfig(
            block_size=args.block_size,
            enable_prefix_caching=args.enable_prefix_caching,
            shared_prefix_attention=args.shared_prefix_attention,
            log_content=args.log_content,
            **given,
        )
        return Engine(model, tokenizer, config, model_name=name)
    except (MemoryRefused, ValueError) as error:
        raise CannotServe(in_flags(str(error), _ENGINE_FIELDS)) from error


def _shortfall(memory: MemoryPlan) -> str | None:
    """What the pool keeps clients from asking, in numbers; None where it holds the longest request."""
    wanted = memory.model_context if memory.max_model_len is None else memory.max_model_len
    if memory.pool_tokens >= wanted:
        return None
    whose = "the model's context" if memory.max_model_len is None else "--max-model-len"
    return (
        f"the KV pool of {memory.pool_bytes:,} bytes holds {memory.pool_tokens:,} tokens, fewer than the "
        f"{wanted:,} of {whose}: the longest request is {memory.longest_request:,} tokens"
    )


def _import_web_stack() -> None:
    import octavo.api.app
    import octavo.api.server  # noqa: F401


def _how_to_talk(url: str, loaded: Loaded, *, keyed: bool) -> list[str]:
    key = "the API key" if keyed else "unused"
    header = " -H 'Authorization: Bearer KEY'" if keyed else ""
    if loaded.chat_template is None:
        path, body = "completions", '{"prompt": "Once upon a time"}'
    else:
        path, body = "chat/completions", '{"messages": [{"role": "user", "content": "Hello!"}]}'
    return [
        f"from a shell     curl {url}/v1/{path}{header} -d '{body}'",
        f"from Python      openai.OpenAI(base_url='{url}/v1', api_key='{key}'), model '{loaded.name}'",
    ]


class _Speaker:
    """Words for the person at the terminal; plain text where there is none."""

    def __init__(self) -> None:
        self._console: Any = None
        if sys.stdout.isatty():
            from rich.console import Console

            self._console = Console(highlight=False)

    def heading(self, text: str) -> None:
        self._say(text, "bold green")

    def warning(self, text: str) -> None:
        self._say(f"note: {text}", "yellow")

    def lines(self, lines: list[str]) -> None:
        for line in lines:
            self._say(f"  {line}", None)

    def _say(self, text: str, style: str | None) -> None:
        if self._console is None:
            print(text, flush=True)
        else:
            self._console.print(text, style=style, markup=False, soft_wrap=True)


def _set_up_logging() -> None:
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _refuse(sentence: str) -> int:
    print(f"octavo: error: {sentence}", file=sys.stderr)
    return 1


def _seconds_since_command() -> float:
    """Seconds since this process was made, the interpreter's own start included."""
    try:
        started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return time.process_time()


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port from 0 to 65535")
    return int(text)


def _key(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the key must not be empty")
    if text != text.strip(" ") or any(char < " " or char == "\x7f" for char in text):
        raise argparse.ArgumentTypeError(
            "the key must not begin or end with a space nor hold control characters: no client could send it"
        )
    return text


def _apply_environment(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> list[str]:
    """Make OCTAVO_NAME the default of --name. Returns what is wrong with the values, a sentence each.

    Problems are told by `run`, so that a bad variable cannot keep `octavo --help` from working.
    """
    problems = []
    for action in parser._actions:
        variable = ENVIRONMENT_PREFIX + action.dest.upper()
        given = environ.get(variable)
        if (
            not given or action.dest == "help"
        ):  # set and empty counts as not set, as it does for XDG's variables
            continue
        value: Any = given
        try:
            if isinstance(action.default, bool):
                value = _WORDS[given.lower()]
            elif action.type is not None:
                value = action.type(given)  # type: ignore[operator]
            if action.choices is not None and value not in action.choices:
                raise ValueError
        except argparse.ArgumentTypeError as error:
            problems.append(f"{variable}: {error}")
        except KeyError:
            problems.append(f"{variable}: '{given}' is neither true nor false")
        except ValueError:
            allowed = f", it must be one of {', '.join(map(str, action.choices))}" if action.choices else ""
            problems.append(f"{variable}: '{given}' is not valid{allowed}")
        else:
            action.default = value
    return problems

"""The `octavo` command: finds the sub-command and loads only that one, because start-up is counted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from octavo.cli.interrupts import INTERRUPTED, interrupts_end_the_process

COMMANDS = ("serve", "keys", "chat", "pull", "bench")
"""Each is a module of `octavo.cli` with `add_parser(subparsers)` and `run(args) -> exit code`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns: its exit code; 2 where there is no command, 130 after Ctrl-C."""
    with interrupts_end_the_process():
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        except KeyboardInterrupt:
            return INTERRUPTED


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="octavo",
        usage="octavo COMMAND [OPTIONS]",
        description="A language model server for one machine and many people, on paged KV memory.",
        epilog="'octavo COMMAND --help' explains a command. To begin: 'octavo pull smollm2-135m', then "
        "'octavo serve'.",
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    subparsers = parser.add_subparsers(title="commands", prog="octavo", dest="command", metavar="COMMAND")
    wanted = arguments[0] if arguments and arguments[0] in COMMANDS else None
    modules = {name: import_module(f"octavo.cli.{name}") for name in COMMANDS if wanted in (None, name)}
    for module in modules.values():
        module.add_parser(subparsers)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 2
    return int(modules[args.command].run(args))


class _Version(argparse.Action):
    """Looks the version up when asked for: reading a package's metadata takes longer than parsing a
    command.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"octavo {version('octavo')}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())

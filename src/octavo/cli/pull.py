"""`octavo pull NAME`: fetch a model into the cache."""

from __future__ import annotations

import argparse
import json
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from octavo.cli.interrupts import INTERRUPTED, interrupts_raise

if TYPE_CHECKING:
    from rich.progress import TaskID


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from octavo.model.catalog import KNOWN_MODELS

    parser = subparsers.add_parser(
        "pull",
        usage="octavo pull NAME [--json]",
        help="fetch a model",
        description="Fetch a model into ~/.cache/octavo/models (or below $XDG_CACHE_HOME) and verify its "
        "checksum. What is there already is only verified.",
    )
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(KNOWN_MODELS)}, or hf:owner/repo:file")
    parser.add_argument("--json", action="store_true", help="print name, path and checksum as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns: 0 with the file there and verified, 1 if it could not be fetched, 130 if interrupted."""
    from octavo.model.catalog import ModelNotFound
    from octavo.model.download import DownloadError, pull

    try:
        with _ProgressLine() as line, interrupts_raise():
            result = pull(args.name, line)
    except (ModelNotFound, DownloadError) as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("octavo: interrupted; nothing half-written was kept", file=sys.stderr)
        return INTERRUPTED
    if args.json:
        print(
            json.dumps(
                {
                    "name": args.name,
                    "path": str(result.path),
                    "fetched": result.fetched,
                    "sha256": result.sha256,
                }
            )
        )
    elif result.fetched:
        print(f"{args.name} is ready: {result.path}")
    else:
        print(f"{args.name} is already there and verified: {result.path}")
    return 0


class _ProgressLine:
    """One line on standard error that follows a download; without a terminal, one line a finished stage."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:>11}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tasks:  # stopping what never began prints an empty line
            self._progress.stop()

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def progress(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._progress.start()
            self._tasks[stage] = self._progress.add_task(stage, total=total or None)
        self._progress.update(self._tasks[stage], completed=done)

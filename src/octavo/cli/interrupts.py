"""What Ctrl-C does to a command.

Python raises KeyboardInterrupt in whatever runs just then, and some of that (imports, finalizers) drops it or
prints a traceback. So a command ends on the spot, except where there is something to finish or to clear away.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""What a shell reports for a command that ended with Ctrl-C: 130."""


@contextmanager
def interrupts_end_the_process() -> Iterator[None]:
    """At once, quietly, with INTERRUPTED. For loading and measuring: nothing is half written there."""
    with _on_interrupt(_end):
        yield


@contextmanager
def interrupts_raise() -> Iterator[None]:
    """KeyboardInterrupt, for code that has something to do about it."""
    with _on_interrupt(signal.default_int_handler):
        yield


@contextmanager
def _on_interrupt(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as for jobs that a shell script has put into the background
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(_number: int, _frame: FrameType | None) -> None:
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\n")  # the terminal has written ^C where it stood
    os._exit(INTERRUPTED)

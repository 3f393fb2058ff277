"""What is told of an exception that nobody expected: to clients nothing of it, to the log no content.

An exception's text may quote what it stumbled over, and in a step for many that is somebody else's prompt.
"""

from __future__ import annotations

import traceback

STEP_FAILED = "The server failed to compute a step of this request; its log has the cause."
ENGINE_STOPPED = "The engine has stopped after a fault; the server's log has the cause."


def describe(error: BaseException, *, log_content: bool) -> str:
    """Where an exception came from and its type, for the log; what it says only with `log_content`."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    said = f": {error}" if log_content else ""
    return f"{frames}{type(error).__name__}{said}"

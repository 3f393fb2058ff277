"""`latest_only`: of the requests that bear one tag, each ends the one before. For autocomplete, where an
answer to what was typed a moment ago helps nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo.api.errors import APIError

if TYPE_CHECKING:
    from octavo.engine.conversations import Owner


class Endable(Protocol):
    def end(self, error: APIError) -> None:
        """End it now, with this error."""


class LatestOnly:
    """The open request of each tag. A tag is its owner's: an account and user. One thread: the event loop's.

    What an ended request has computed stays in the cache, so the new one computes what was typed since.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[Owner, str], Endable] = {}

    def enter(self, owner: Owner, tag: str, request: Endable) -> None:
        """A request has come: the one before it ends, if it is still open."""
        before = self._open.get((owner, tag))
        self._open[owner, tag] = request
        if before is not None:
            before.end(superseded(tag))

    def leave(self, owner: Owner, tag: str, request: Endable) -> None:
        """It has ended. Idempotent."""
        if self._open.get((owner, tag)) is request:
            del self._open[owner, tag]


def superseded(tag: str) -> APIError:
    """A client library must not ask again by itself: that would end the request that took its place."""
    return APIError(
        409,
        f"A newer request with 'latest_only' {tag!r} has taken the place of this one.",
        code="superseded",
        param="latest_only",
        headers={"x-should-retry": "false"},
    )

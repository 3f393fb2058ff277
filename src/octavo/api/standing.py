"""Why a request waits, told to its client: as a comment in its stream, and as JSON in its record."""

from __future__ import annotations

import msgspec

from octavo.engine.request import Standing


class Progress(msgspec.Struct):
    """Tokens: `computed` of those that are `known`."""

    computed: int
    known: int


class Waiting(msgspec.Struct):
    """`position`: 1 is the next of those that wait, 0 is being computed. `reason`: "kv" (the pool has no room
    yet), "seats" (as many as allowed are computed together), "fair share" (others are more entitled), or null
    where nothing keeps it. `estimate`: seconds until its first, or next, token; null where nobody can tell
    yet."""

    position: int
    reason: str | None
    progress: Progress
    estimate: float | None


def waiting_of(standing: Standing | None) -> Waiting | None:
    """As JSON."""
    if standing is None:
        return None
    return Waiting(
        standing.position,
        standing.reason.value if standing.reason is not None else None,
        Progress(standing.num_computed_tokens, standing.num_tokens),
        round(standing.estimate, 3) if standing.estimate is not None else None,
    )


def comment_line(standing: Standing, *, choice: int | None = None) -> bytes:
    """One line of a server-sent comment, without its end; every value is one word.

        : octavo waiting position=3 reason=kv progress=0/3000 estimate=4.2s
        : octavo computing progress=1024/3000 estimate=1.9s

    choice: the index of the choice, where there are several. `reason` and `estimate` are left out where there
    is none.
    """
    waits = standing.position > 0 or standing.reason is not None
    words = ["octavo", "waiting" if waits else "computing"]
    if choice is not None:
        words.append(f"choice={choice}")
    if waits:
        words.append(f"position={standing.position}")
    if standing.reason is not None:
        words.append(f"reason={standing.reason.value.replace(' ', '_')}")
    words.append(f"progress={standing.num_computed_tokens}/{standing.num_tokens}")
    if standing.estimate is not None:
        words.append(f"estimate={standing.estimate:.1f}s")
    return f": {' '.join(words)}".encode()


def in_words(standing: Standing | None) -> str:
    """For the end of a sentence about a request."""
    if standing is None:
        return "it was about to be served"
    if standing.position > 0:
        why = f" ({standing.reason.value})" if standing.reason is not None else ""
        return f"it was at position {standing.position:,} of those that wait{why}"
    return f"{standing.num_computed_tokens:,} of its {standing.num_tokens:,} tokens were computed"

"""Whose a sequence is, where people share one machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the machine that a sequence draws on.

    account: an API key or an address; whose cached content it is. background: nobody waits for it; it yields
    to everybody who is not.
    """

    account: str = ""
    background: bool = False


NOBODYS = Share()
"""Of a sequence that nobody in particular asked for."""

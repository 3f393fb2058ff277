"""Whose a sequence is, where people share one machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the machine that a sequence draws on.

    account: an API key or an address; whose cached content it is. user: divides the part of the account and
    never adds to it. weight: the account's part beside others', above 0. background: nobody waits for it; it
    yields to everybody who is not.

    Raises: ValueError, if the weight is not a finite number above 0.
    """

    account: str = ""
    user: str = ""
    weight: float = 1.0
    background: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight must be a finite number above 0, not {self.weight}")


NOBODYS = Share()
"""Of a sequence that nobody in particular asked for."""

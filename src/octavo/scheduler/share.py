"""Whose a sequence is, where people share one machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the machine that a sequence draws on.

    account: an API key or an address; accounts share the machine by their weights. user: one of an account's;
    users divide what their account has, equally, and never add to it. weight: more than 0; an account of
    weight 3 gets three times the service of one of weight 1 while both wait. background: nobody waits for it;
    it yields to everyone who is not.

    Raises: ValueError for a weight that is not a positive number.
    """

    account: str = ""
    user: str = ""
    weight: float = 1.0
    background: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"a weight must be a number above 0, not {self.weight}")


NOBODYS = Share()
"""Of a sequence that nobody in particular asked for."""

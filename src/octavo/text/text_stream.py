"""From the tokens of one answer to its text: what may be shown now, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.text.detokenizer import Detokenizer
from octavo.text.stop_strings import StopStrings
from octavo.text.tokenizer import Tokenizer


class Gained(NamedTuple):
    """What some tokens brought.

    text: what is now safe to show.
    starts: for each token that belongs to the answer, the character of the whole answer at which its text
        begins; fewer than the tokens given where a stop string has ended the answer.
    """

    text: str
    starts: list[int]


class TextStream:
    """The text of one growing answer. The result does not depend on how its tokens were cut into calls.

    | shown | held back: may begin a stop string | bytes of an unfinished character |

    matched: the stop string that ended the answer, None until then. The token that completes it is the
    answer's last; whatever was computed after it belongs to nobody.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        """min_tokens: text of this many first tokens is no part of a stop string, whatever it is.

        Raises: ValueError for an empty stop string.
        """
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_characters = 0

    @property
    def matched(self) -> str | None:
        return self._stops.matched

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> Gained:
        """Take tokens in. last: no more will come, so that nothing need be held back any longer.

        Raises: InvalidTokenId.
        """
        shown = []
        starts: list[int] = []
        # One at a time: only so is it known with which token a stop string was complete.
        for token_id in token_ids:
            if self.matched is not None:
                break
            starts.append(self._num_characters)
            self._num_tokens += 1
            shown.append(self._screened(self._detokenizer.add((token_id,))))
        if last and self.matched is None:
            shown.append(self._screened(self._detokenizer.finish()))
            if self.matched is None:
                shown.append(self._stops.finish())
        return Gained("".join(shown), starts)

    def _screened(self, text: str) -> str:
        """The part of `text`, which the newest token has completed, that no stop string can claim."""
        self._num_characters += len(text)
        return text if self._num_tokens <= self._min_tokens else self._stops.push(text)

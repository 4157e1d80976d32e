"""Guesses at the tokens to come, so that a step may say several: prompt lookup, without a second model.

What followed the last NGRAM tokens where they stood before, in the prompt or the answer, is guessed to
follow again (prompt lookup decoding, Saxena 2023). A step computes the guesses behind the last token, as a
chunk, and draws at each row what it would have drawn there alone: what was guessed wrong ends it. Rows do not
depend on their neighbours, so an answer's bits are those of one token a step; only the time is another.

A guess costs a row. It pays where what is right of it saves more, by later steps, than the row takes now:
while a step's fixed cost is large beside its rows, even unlikely guesses do; in a full batch sure ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headrace.messages import SamplingParams

if TYPE_CHECKING:
    from worker.engine.request import Sequence

NGRAM = 3
FIRST_RATE = 0.7  # share of guesses that come true, until some have been judged
LEARNING = 0.2  # weight of the guess judged last
RECOVERY = 0.02  # of the way back to FIRST_RATE at each guess that is not worth a row: texts change


class Draft:
    """What one sequence has said before, by NGRAM tokens, and how often guesses from it have come true."""

    __slots__ = ("_after", "_indexed", "rate")

    def __init__(self) -> None:
        self.rate = FIRST_RATE
        self._after: dict[tuple[int, ...], int] = {}  # by n-gram: the place behind where it stood last
        self._indexed = NGRAM - 1

    def guess(self, seq: Sequence, count: int) -> list[int]:
        """At most `count` tokens that may follow; none where the last tokens never stood before."""
        length = seq.num_tokens
        self._index(seq, length - 1)
        at = self._after.get(tuple(seq.tokens(max(length - NGRAM, 0), length)))
        if at is None:
            return []
        found = seq.tokens(at, min(at + count, length))
        period = length - at  # of what repeats itself: behind the last token the guess goes on with the guess
        while len(found) < count:
            found.append(found[len(found) - period])
        return found

    def _index(self, seq: Sequence, end: int) -> None:
        """Notes the n-grams up to `end`, behind each of which a token is known."""
        start = self._indexed + 1 - NGRAM
        fresh = seq.tokens(start, end) if end > self._indexed else []
        for n in range(NGRAM, len(fresh) + 1):
            self._after[tuple(fresh[n - NGRAM : n])] = start + n
        self._indexed = max(self._indexed, end)

    def worth(self, least: float, most: int) -> int:
        """How many guesses on end are as likely as `least` to be reached and right, up to `most`."""
        if self.rate >= 1.0:
            return most
        count = int(math.log(least) / math.log(self.rate)) if self.rate > 0 else 0
        if count == 0:
            self.rate += RECOVERY * (FIRST_RATE - self.rate)
        return min(count, most)

    def judge(self, guessed: int, right: int) -> None:
        """After a step: the guesses that were right, and the one that ended it, if any."""
        for _ in range(right):
            self.rate += LEARNING * (1.0 - self.rate)
        if right < guessed:
            self.rate -= LEARNING * self.rate


def may_guess(params: SamplingParams) -> bool:
    """Not where a token's odds depend on those before it in more than the model: rows are drawn together."""
    penalised = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    return not (penalised or params.bad_words)

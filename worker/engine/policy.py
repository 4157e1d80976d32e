"""Who goes first: one number for each request, fixed when it arrives.

    rank = arrival_s + ageing_s * (class rank + handicap)        handicap in [0, 1], by the order in the class

The smaller rank goes first. Classes rule as long as requests arrive within `ageing_s` of one another; waiting
is worth one class for each `ageing_s`. So nothing starves: no request that arrives later than
`ageing_s * (class rank + 1)` after a given one is ever ranked before it, whatever the policy
(`ageing_s * class rank` for fcfs).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from worker.engine.request import Request, Sequence

TYPICAL_TOKENS = 512  # cost at which the handicap of shortest-first is one half

order_key = attrgetter("key")


def _fcfs(request: Request, ageing_s: float) -> float:
    return 0.0


def _shortest_first(request: Request, ageing_s: float) -> float:
    """Cost: the prompt and the most that can be generated, squashed to [0, 1)."""
    cost = len(request.prompt_ids) + (request.params.max_tokens or 0)
    return cost / (cost + TYPICAL_TOKENS)


def _deadline(request: Request, ageing_s: float) -> float:
    """Earliest deadline first; deadlines further off than `ageing_s` count as none."""
    if request.deadline_s is None:
        return 1.0
    return min(1.0, max(0.0, (request.deadline_s - request.arrival_s) / ageing_s))


POLICIES: dict[str, Callable[[Request, float], float]] = {
    "fcfs": _fcfs,
    "shortest-first": _shortest_first,
    "deadline": _deadline,
}


def rank(request: Request, policy: str, ageing_s: float) -> float:
    """The request's place in the order, in seconds; see the module's head for the bound it keeps."""
    return request.arrival_s + ageing_s * (request.priority + POLICIES[policy](request, ageing_s))


class OrderedSequences:
    """Sorted by key (rank, order of arrival, choice): a preempted sequence gets its old place back."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._items)

    def __getitem__(self, index: int) -> Sequence:
        return self._items[index]

    def __contains__(self, seq: Sequence) -> bool:
        return self._find(seq) is not None

    def add(self, seq: Sequence) -> None:
        insort(self._items, seq, key=order_key)

    def discard(self, seq: Sequence) -> bool:
        """Take it out if it is there."""
        index = self._find(seq)
        if index is None:
            return False
        del self._items[index]
        return True

    def _find(self, seq: Sequence) -> int | None:
        index = bisect_left(self._items, seq.key, key=order_key)
        return index if index < len(self._items) and self._items[index] is seq else None

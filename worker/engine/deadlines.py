"""Which requests have run out of time. Ended ones are forgotten, however far their deadline is."""

from __future__ import annotations

import heapq

from worker.engine.request import Group

SLACK = 64  # ended groups that may stay in the heap beside the live ones


class Deadlines:
    """A heap of (deadline, order of arrival, group)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Group]] = []
        self._compact_at = SLACK

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, group: Group) -> None:
        if group.request.deadline_s is not None:
            heapq.heappush(self._heap, (group.request.deadline_s, group.order, group))
            if len(self._heap) > self._compact_at:
                self._compact()

    def pop_due(self, now: float) -> Group | None:
        """A live group whose deadline has passed, or None."""
        next_s = self.next_s()
        return heapq.heappop(self._heap)[2] if next_s is not None and next_s <= now else None

    def next_s(self) -> float | None:
        """The earliest deadline of a live group."""
        while self._heap and not self._heap[0][2].live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2].live]
        heapq.heapify(self._heap)
        self._compact_at = 2 * len(self._heap) + SLACK

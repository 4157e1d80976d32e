"""How requests get into the batch: at every step, or a batch at a time (to compare with).

continuous  a waiting sequence joins as soon as there is room; a finished one leaves its slot at once.
static      waits for a full batch of max_num_seqs, at most `wait_s`; nobody joins until all of it has
            finished, and finished ones keep their slots until then.
dynamic     the same with what has arrived within the short window `wait_s` after the oldest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

MODES = ("continuous", "static", "dynamic")


class AdmissionGate(Protocol):
    def quota(self, now: float, running: int, waiting: int, arrivals: Iterable[float]) -> int:
        """How many waiting sequences may be admitted now."""

    def admitted(self) -> None: ...

    def returned(self) -> None:
        """An admitted sequence was preempted: it will be admitted again."""

    def slots(self, running: int) -> int:
        """Slots of max_num_seqs in use."""

    def is_shut(self, running: int) -> bool:
        """Whether new requests have to wait for the whole batch."""

    def wake_at(self, running: int, waiting: int, arrivals: Iterable[float]) -> float | None:
        """When the gate opens by itself, if it is only time that it waits for."""


class ContinuousGate:
    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs

    def quota(self, now: float, running: int, waiting: int, arrivals: Iterable[float]) -> int:
        return self._max_num_seqs

    def admitted(self) -> None:
        pass

    def returned(self) -> None:
        pass

    def slots(self, running: int) -> int:
        return running

    def is_shut(self, running: int) -> bool:
        return False

    def wake_at(self, running: int, waiting: int, arrivals: Iterable[float]) -> float | None:
        return None


class BatchGate:
    """Opens for one batch, then stays shut until the last of it has finished."""

    def __init__(self, max_num_seqs: int, wait_s: float) -> None:
        self._max_num_seqs = max_num_seqs
        self._wait_s = wait_s
        self._quota = 0
        self._slots = 0

    def quota(self, now: float, running: int, waiting: int, arrivals: Iterable[float]) -> int:
        if running == 0:
            full = waiting >= self._max_num_seqs
            ripe = not full and waiting > 0 and now >= min(arrivals) + self._wait_s
            self._slots = 0
            self._quota = min(waiting, self._max_num_seqs) if full or ripe else 0
        return self._quota

    def admitted(self) -> None:
        self._quota -= 1
        self._slots += 1

    def returned(self) -> None:
        self._quota += 1
        self._slots -= 1

    def slots(self, running: int) -> int:
        return self._slots if running else 0

    def is_shut(self, running: int) -> bool:
        return running > 0

    def wake_at(self, running: int, waiting: int, arrivals: Iterable[float]) -> float | None:
        return None if running or not waiting else min(arrivals) + self._wait_s


def make_gate(mode: str, max_num_seqs: int, wait_s: float) -> AdmissionGate:
    """Raises ValueError on an unknown mode."""
    if mode not in MODES:
        raise ValueError(f"batching={mode!r} is none of {', '.join(MODES)}")
    return ContinuousGate(max_num_seqs) if mode == "continuous" else BatchGate(max_num_seqs, wait_s)

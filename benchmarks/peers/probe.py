"""How fast the machine is at this moment, beside each figure: hosts drift by a quarter within an hour."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

SIDE = 1536
READ_MIB = 256
TRIES = 5


@dataclass(frozen=True, slots=True)
class Speed:
    """A large fp32 product, and a sum over memory no cache holds."""

    gflops: float
    read_gb_s: float


def measure(threads: int) -> Speed:
    """About half a second with all `threads`."""
    import torch

    torch.set_num_threads(threads)
    matrix = torch.randn(SIDE, SIDE)
    memory = torch.ones(READ_MIB * 2**18)
    product_s = _median_s(lambda: matrix @ matrix)
    read_s = _median_s(lambda: memory.sum())
    return Speed(2 * SIDE**3 / product_s / 1e9, memory.nbytes / read_s / 1e9)


def _median_s(work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(TRIES):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)

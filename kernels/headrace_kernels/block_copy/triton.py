"""Copies of whole KV blocks in Triton, one launch a cache."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _copy(
    cache,  # [blocks, size]
    pairs,  # [pairs, 2] int64: source, destination
    size,
    BLOCK: tl.constexpr,
):
    source = tl.load(pairs + 2 * tl.program_id(0))
    destination = tl.load(pairs + 2 * tl.program_id(0) + 1)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(cache + source * size + at, mask=at < size)
    tl.store(cache + destination * size + at, values, mask=at < size)


def copy_blocks(caches: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """In each contiguous cache [blocks, …], block `destination` becomes block `source`.

    Raises ValueError where a block is both, or is named twice as a destination, or does not exist.
    """
    sources, destinations = {s for s, _ in pairs}, [d for _, d in pairs]
    if sources & set(destinations) or len(set(destinations)) < len(destinations):
        raise ValueError("a block is copied to twice, or copied from and to")
    blocks = min((cache.shape[0] for cache in caches), default=0)
    if any(not 0 <= block < blocks for pair in pairs for block in pair):
        raise ValueError(f"blocks must lie in 0..{blocks - 1}")
    if not pairs:
        return
    flat = torch.tensor(pairs, dtype=torch.int64).to(caches[0].device)
    for cache in caches:
        raw = cache.view(cache.shape[0], -1).view(torch.uint8)
        size = raw.shape[1]
        if size % 8 == 0:
            raw, size = raw.view(torch.int64), size // 8
        _copy[(len(pairs), triton.cdiv(size, BLOCK))](raw, flat, size, BLOCK=BLOCK)

"""Copies of whole KV blocks in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_blocks(cache: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """A copy of cache [blocks, …] in which block `destination` is `source` for each (source, destination)."""
    out = cache.clone()
    if pairs:
        out[torch.tensor([d for _, d in pairs])] = cache[torch.tensor([s for s, _ in pairs])]
    return out

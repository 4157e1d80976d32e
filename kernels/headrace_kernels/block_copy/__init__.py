"""Copies of whole KV blocks, all layers in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..dispatch import Backend, backend
from . import reference


def copy_blocks(
    caches: Sequence[Tensor], pairs: Sequence[tuple[int, int]], *, on: Backend | None = None
) -> None:
    """In each cache [blocks, …], block `destination` becomes block `source`, for each (source, destination).

    Raises ValueError where a block is both, or is named twice as a destination, or does not exist.
    """
    sources, destinations = {s for s, _ in pairs}, [d for _, d in pairs]
    if sources & set(destinations) or len(set(destinations)) < len(destinations):
        raise ValueError("a block is copied to twice, or copied from and to")
    blocks = min((cache.shape[0] for cache in caches), default=0)
    if any(not 0 <= block < blocks for pair in pairs for block in pair):
        raise ValueError(f"blocks must lie in 0..{blocks - 1}")
    if any(not cache.is_contiguous() or cache.device != torch.device("cpu") for cache in caches):
        raise ValueError("caches must be contiguous and on the CPU")
    addresses = np.array([cache.data_ptr() for cache in caches], np.int64)
    sizes = np.array([cache[0].numel() * cache.element_size() for cache in caches], np.int64)
    flat = np.array(pairs, np.int64)
    (on or backend()).library.hr_copy_blocks(
        addresses.ctypes.data, sizes.ctypes.data, len(caches), flat.ctypes.data, len(pairs)
    )


__all__ = ["copy_blocks", "reference"]

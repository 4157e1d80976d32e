"""The keys and values of all sequences, in blocks, one pair of tensors a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Of one attention layer: heads that hold keys and values, and their sizes, which may differ."""

    kv_heads: int
    k_dim: int
    v_dim: int

    def bytes_per_token(self, itemsize: int) -> int:
        return self.kv_heads * (self.k_dim + self.v_dim) * itemsize


class KVCache:
    """k[layer], v[layer]: [num_blocks + 1, block_size, kv_heads, dim]. The last block stays zero: padding.

    No slot holds a stale NaN or infinity: a block is cleared when its first slot is about to be written, so
    masked slots of a partly filled block contribute exact zeros (0 · NaN would not).
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks}, block_size={block_size}: both must be positive")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.layers = tuple(layers)

        def blocks(heads: int, dim: int) -> Tensor:
            return torch.zeros(num_blocks + 1, block_size, heads, dim, dtype=dtype, device=device)

        self.k = [blocks(layer.kv_heads, layer.k_dim) for layer in self.layers]
        self.v = [blocks(layer.kv_heads, layer.v_dim) for layer in self.layers]

    @property
    def dummy_block(self) -> int:
        return self.num_blocks

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [T, kv_heads, dim] at slots [T] (block · block_size + offset)."""
        self.k[layer].flatten(0, 1).index_copy_(0, slots, key)
        self.v[layer].flatten(0, 1).index_copy_(0, slots, value)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination), as if all at once."""
        if not copies:
            return
        device = self.k[0].device
        source = torch.tensor([s for s, _ in copies], device=device)
        destination = torch.tensor([d for _, d in copies], device=device)
        for tensor in (*self.k, *self.v):
            tensor.index_copy_(0, destination, tensor.index_select(0, source))

    def clear_blocks(self, blocks: npt.NDArray[np.int64]) -> None:
        if not len(blocks):
            return
        index = torch.from_numpy(blocks).to(self.k[0].device)
        for tensor in (*self.k, *self.v):
            tensor.index_fill_(0, index, 0.0)

"""The keys and values of all sequences, in blocks, one pair of tensors a layer."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.models import ModelError
from headrace_kernels.rotary_kv.reference import narrow, quantise
from worker.model.transfer import send

KV_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
_SCALED = (torch.int8, torch.float8_e4m3fn)
_SCALE_BYTES = 4


def choose_kv_dtype(
    name: str, arithmetic: torch.dtype, device: torch.device, *, int8_activations: bool = False
) -> torch.dtype:
    """What keys and values are kept in. `auto`: what the model computes in, bytes beside products of bytes.

    Raises ModelError for a name that is unknown or does not fit.
    """
    if name == "auto":
        return torch.int8 if int8_activations else arithmetic
    dtype = KV_DTYPES.get(name)
    if dtype is None:
        raise ModelError(f"kv_dtype {name!r}: give auto, {', '.join(KV_DTYPES)}")
    if dtype == torch.float8_e4m3fn and device.type == "cpu":
        raise ModelError("kv_dtype 'fp8': on the CPU give int8, which takes as much and is finer")
    if dtype not in (*_SCALED, arithmetic) and arithmetic != torch.float32:
        raise ModelError(f"kv_dtype {name!r}: a model in {arithmetic} keeps that, int8 or fp8")
    return dtype


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Of one attention layer: heads that hold keys and values, and their sizes, which may differ."""

    kv_heads: int
    k_dim: int
    v_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        scales = 2 * _SCALE_BYTES if dtype in _SCALED else 0
        return self.kv_heads * ((self.k_dim + self.v_dim) * dtype.itemsize + scales)


class KVCache:
    """k[layer], v[layer]: [num_blocks + 1, block_size, kv_heads, dim]. The last block stays zero: padding.

    In int8 and fp8 each head of each token has a scale: k_scales[layer], v_scales[layer] [num_blocks + 1,
    block_size, kv_heads] fp32; otherwise these lists are empty. On the CPU memory is taken from the system
    when a block is first written.

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
        self.layers, self.dtype = tuple(layers), dtype
        self.device = torch.device(device)

        def blocks(*shape: int, of: torch.dtype) -> Tensor:
            return _zeros((num_blocks + 1, block_size, *shape), of, self.device)

        self.k = [blocks(layer.kv_heads, layer.k_dim, of=dtype) for layer in self.layers]
        self.v = [blocks(layer.kv_heads, layer.v_dim, of=dtype) for layer in self.layers]
        scaled = self.layers if dtype in _SCALED else ()
        self.k_scales = [blocks(layer.kv_heads, of=torch.float32) for layer in scaled]
        self.v_scales = [blocks(layer.kv_heads, of=torch.float32) for layer in scaled]

    @property
    def dummy_block(self) -> int:
        return self.num_blocks

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return (self.k_scales[layer], self.v_scales[layer]) if self.k_scales else None

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [T, kv_heads, dim] at slots [T] (block · block_size + offset), rounded."""
        if scales := self.scales(layer):
            (key, k_scale), (value, v_scale) = (quantise(x.float(), self.dtype) for x in (key, value))
            for cache, scale in zip(scales, (k_scale, v_scale), strict=True):
                cache.flatten(0, 1).index_copy_(0, slots, scale)
        for cache, x in ((self.k[layer], key), (self.v[layer], value)):
            _bits(cache).flatten(0, 1).index_copy_(0, slots, _bits(narrow(x, self.dtype)))

    def read(self, layer: int, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [R, dim] of the rows [R] (slot · kv_heads + head) of a layer, in `dtype`."""
        scales = self.scales(layer)
        found = []
        for i, cache in enumerate((self.k[layer], self.v[layer])):
            x = _bits(cache).flatten(0, 2).index_select(0, rows).view(self.dtype)
            if scales:
                x = x.float() * scales[i].flatten().index_select(0, rows)[:, None]
            found.append(x.to(dtype))
        return found[0], found[1]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination), as if all at once."""
        if not copies:
            return
        source, destination = send(torch.tensor(copies).T.contiguous(), self.device)
        for tensor in self._tensors():
            tensor.index_copy_(0, destination, tensor.index_select(0, source))

    def clear_blocks(self, blocks: npt.NDArray[np.int64]) -> None:
        if not len(blocks):
            return
        index = torch.from_numpy(blocks).to(self.device)
        for tensor in self._tensors():
            tensor.index_fill_(0, index, 0)

    def _tensors(self) -> list[Tensor]:
        return [_bits(t) for t in (*self.k, *self.v, *self.k_scales, *self.v_scales)]


def _bits(x: Tensor) -> Tensor:
    """fp8 as plain bytes, which every operation on indices knows."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros writes all of it; pages of a new mapping are zero, and there once they are touched."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    private = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(private, dtype=dtype).view(shape)

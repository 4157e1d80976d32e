"""Head norms, rotary embedding and the KV write in one pass over the projected queries, keys and values."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import Backend, backend
from ..native import structs
from ..paged_attention import Scales, attention_shape, kv_cache
from . import reference


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """How queries and keys are prepared. Build with `rotary`."""

    tensors: tuple[Tensor, ...]  # kept alive for the struct
    positions: int | None  # rows of the tables; None without rotation
    struct: structs.RotaryOptions


def rotary(
    cosines: Tensor | None,
    sines: Tensor | None,
    *,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    epsilon: float = 1e-6,
) -> Rotary:
    """Tables [positions, dims / 2] (None: no rotation); RMS norm weights [k_dim] of heads (None: none)."""
    cos, sin, q, k = (
        None if t is None else t.to(torch.float32).contiguous() for t in (cosines, sines, q_norm, k_norm)
    )
    if (None if cos is None else cos.shape) != (None if sin is None else sin.shape):
        raise ValueError("cosines and sines must be tables of one shape")
    dims, positions = (0, None) if cos is None else (2 * cos.shape[1], cos.shape[0])
    address = [None if t is None else t.data_ptr() for t in (cos, sin, q, k)]
    struct = structs.RotaryOptions(*address[:2], dims, int(interleaved), *address[2:], epsilon)
    return Rotary(tuple(t for t in (cos, sin, q, k) if t is not None), positions, struct)


def rotary_kv_write(
    qkv: Tensor,
    how: Rotary,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
    scales: Scales | None = None,
    on: Backend | None = None,
) -> None:
    """Rotates queries in place and writes keys and values to `slots` [tokens] (block · block_size + offset).

    qkv is fp32 [tokens, (heads + kv_heads) · k_dim + kv_heads · v_dim]; caches and `scales` as in
    paged_attention. What is stored of a head depends on that head of that token alone.
    """
    shape, cache = attention_shape(heads, keys, values), kv_cache(keys, values, scales)
    width = (heads + shape.kv_heads) * shape.k_dim + shape.kv_heads * shape.v_dim
    if qkv.dtype != torch.float32 or qkv.ndim != 2 or qkv.shape[1] != width or not qkv.is_contiguous():
        raise ValueError(f"qkv must be contiguous fp32 [tokens, {width}]")
    for name, t in (("positions", positions), ("slots", slots)):
        if t.dtype != torch.int64 or t.shape != qkv.shape[:1] or not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous int64 [{qkv.shape[0]}]")
    if how.struct.dims > shape.k_dim:
        raise ValueError(f"{how.struct.dims} rotated dimensions of a head of {shape.k_dim}")
    if how.positions is not None and qkv.shape[0] and int(positions.max()) >= how.positions:
        raise ValueError(f"position {int(positions.max())} is past the tables' {how.positions}")
    (on or backend()).library.hr_rotary_kv_write(
        ctypes.byref(shape),
        ctypes.byref(how.struct),
        qkv.data_ptr(),
        qkv.shape[0],
        positions.data_ptr(),
        slots.data_ptr(),
        ctypes.byref(cache),
    )


__all__ = ["Rotary", "reference", "rotary", "rotary_kv_write"]

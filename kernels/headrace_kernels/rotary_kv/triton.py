"""Head norms, rotary embedding and the KV write in Triton: one program for each head of each token.

Keys and values may be stored in int8 or fp8 (e4m3), each head of each token with a scale of its own, so that
what is stored depends on that token alone.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_device import block_of

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Tables [positions, dims / 2] (None: no rotation) and RMS norm weights of heads [k_dim] (None: none)."""

    cosines: Tensor | None = None
    sines: Tensor | None = None
    interleaved: bool = False
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    epsilon: float = 1e-6


@triton.jit
def _norm_weight(norm, at, K_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    if HAS_NORM:
        w = tl.load(norm + at, mask=at < K_DIM, other=0.0).to(tl.float32)
    else:
        w = tl.where(at < K_DIM, 1.0, 0.0)
    return w


@triton.jit
def _rotated(
    x,  # the head's first element
    norm,
    cosines,
    sines,
    position,
    epsilon,
    K_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    h = tl.load(x + at, mask=at < K_DIM, other=0.0).to(tl.float32)
    scale = 1.0
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(h * h, 0) / K_DIM + epsilon)
    y = h * scale * _norm_weight(norm, at, K_DIM, HAS_NORM)
    if DIMS > 0:
        if INTERLEAVED:
            pair, is_first = at // 2, at % 2 == 0
            other = tl.where(is_first, at + 1, at - 1)
        else:
            pair, is_first = at % (DIMS // 2), at < DIMS // 2
            other = tl.where(is_first, at + DIMS // 2, at - DIMS // 2)
        turns = at < DIMS
        other = tl.where(turns, other, at)
        z = tl.load(x + other, mask=at < K_DIM, other=0.0).to(tl.float32)
        z = z * scale * _norm_weight(norm, other, K_DIM, HAS_NORM)
        cos = tl.load(cosines + position * (DIMS // 2) + pair, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sines + position * (DIMS // 2) + pair, mask=turns, other=0.0).to(tl.float32)
        y = y * cos + tl.where(is_first, -z, z) * sin
    return y


@triton.jit
def _store(cache, scales, place, stride, at_scale, y, at, DIM: tl.constexpr, LARGEST: tl.constexpr):
    if LARGEST > 0:
        scale = tl.max(tl.abs(y), 0) / LARGEST
        tl.store(scales + at_scale, scale)
        y = y * tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)
        if LARGEST == 127.0:
            y = tl.floor(y + 0.5)
    tl.store(cache + place + at * stride, y.to(cache.dtype.element_ty), mask=at < DIM)


@triton.jit
def _rotary_kv(
    qkv,  # [tokens, heads · k_dim + kv_heads · (k_dim + v_dim)]
    rotated,  # [tokens, heads, k_dim]
    positions,  # [tokens]
    slots,  # [tokens], negative: written nowhere
    keys,  # [blocks, kv_heads, k_dim, block_size] by strides
    values,  # [blocks, kv_heads, block_size, v_dim] by strides
    k_scales,  # [blocks, block_size, kv_heads]
    v_scales,
    cosines,  # [positions, DIMS / 2]
    sines,
    q_norm,  # [k_dim]
    k_norm,
    k_strides,
    v_strides,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    LARGEST: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = qkv + token * ((HEADS + KV_HEADS) * K_DIM + KV_HEADS * V_DIM)
    position, slot = tl.load(positions + token).to(tl.int64), tl.load(slots + token).to(tl.int64)
    if head < HEADS:
        at = tl.arange(0, K_BLOCK)
        y = _rotated(
            row + head * K_DIM, q_norm, cosines, sines, position, epsilon,
            K_DIM, DIMS, K_BLOCK, INTERLEAVED, HAS_Q_NORM,
        )  # fmt: skip
        place = rotated + (token * HEADS + head) * K_DIM + at
        tl.store(place, y.to(rotated.dtype.element_ty), mask=at < K_DIM)
    elif slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        if head < HEADS + KV_HEADS:
            kv_head = head - HEADS
            y = _rotated(
                row + head * K_DIM, k_norm, cosines, sines, position, epsilon,
                K_DIM, DIMS, K_BLOCK, INTERLEAVED, HAS_K_NORM,
            )  # fmt: skip
            place = block * k_strides[0] + kv_head * k_strides[1] + offset * k_strides[3]
            at_scale = slot * KV_HEADS + kv_head
            _store(keys, k_scales, place, k_strides[2], at_scale, y, tl.arange(0, K_BLOCK), K_DIM, LARGEST)
        else:
            kv_head = head - HEADS - KV_HEADS
            at = tl.arange(0, V_BLOCK)
            begin = row + (HEADS + KV_HEADS) * K_DIM + kv_head * V_DIM
            y = tl.load(begin + at, mask=at < V_DIM, other=0.0).to(tl.float32)
            place = block * v_strides[0] + kv_head * v_strides[1] + offset * v_strides[2]
            at_scale = slot * KV_HEADS + kv_head
            _store(values, v_scales, place, v_strides[3], at_scale, y, at, V_DIM, LARGEST)


def rotary_kv_write(
    qkv: Tensor,
    how: Rotary,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    heads: int,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Writes keys and values to `slots` [tokens] and returns the queries [tokens, heads, k_dim].

    qkv is [tokens, (heads + kv_heads) · k_dim + kv_heads · v_dim]; caches and `scales` as in
    paged_attention. The caller guarantees that positions lie in the tables and slots in the caches; a
    negative slot is written nowhere. With heads=0 only keys and values are written.
    """
    blocks, kv_heads, k_dim, block_size = keys.shape
    v_dim, tokens = values.shape[3], qkv.shape[0]
    width = (heads + kv_heads) * k_dim + kv_heads * v_dim
    if qkv.shape != (tokens, width) or not qkv.is_contiguous():
        raise ValueError(f"qkv must be contiguous [tokens, {width}]")
    if values.shape[:3] != (blocks, kv_heads, block_size):
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not belong together")
    if (scales is None) != (keys.dtype not in LARGEST):
        raise ValueError(f"keys of {keys.dtype}, scales: {scales is not None}")
    dims = 0 if how.cosines is None else 2 * how.cosines.shape[1]
    if dims > k_dim:
        raise ValueError(f"{dims} rotated dimensions of a head of {k_dim}")
    rotated = torch.empty(tokens, heads, k_dim, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return rotated
    k_scales, v_scales = scales or (qkv, qkv)
    _rotary_kv[(tokens, heads + 2 * kv_heads)](
        qkv, rotated, positions, slots, keys, values, k_scales, v_scales,
        *(qkv if t is None else t for t in (how.cosines, how.sines, how.q_norm, how.k_norm)),
        keys.stride(), values.stride(), how.epsilon,
        HEADS=heads,
        KV_HEADS=kv_heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_BLOCK=block_of(k_dim),
        V_BLOCK=block_of(v_dim),
        BLOCK_SIZE=block_size,
        DIMS=dims,
        INTERLEAVED=how.interleaved,
        HAS_Q_NORM=how.q_norm is not None,
        HAS_K_NORM=how.k_norm is not None,
        LARGEST=LARGEST.get(keys.dtype, 0.0),
        num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return rotated

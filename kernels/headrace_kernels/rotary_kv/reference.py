"""Rotation of heads by position and the write to blocks, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_LARGEST = 1e-30  # below it a head is zeros: 127 divided by it must be finite
LARGEST_HALF = 65504.0
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, *, interleaved: bool = False) -> Tensor:
    """x [tokens, heads, dim] with cosines, sines [tokens, dims / 2]; the rest past `dims` stays."""
    half = cosines.shape[1]
    c, s = cosines[:, None], sines[:, None]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        return torch.cat([torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2), rest], -1)
    a, b = turned[..., :half], turned[..., half:]
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1)


def quantise(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """x [..., dim] in int8 or fp8 (e4m3) with a scale [...] each, by which the largest element fits.

    The scale of what holds NaN or infinity is NaN.
    """
    top = LARGEST[dtype]
    largest = x.abs().amax(-1)
    finite = x.isfinite().all(-1)
    used = finite & (largest > SMALLEST_LARGEST)
    inverse = torch.where(used, top / largest.where(used, 1.0), 0.0)
    scale = torch.where(used, largest / top, torch.where(finite, 0.0, torch.nan))
    scaled = x.where(used[..., None], 0.0) * inverse[..., None]
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a cache's type; what fp16 cannot hold becomes its largest."""
    if dtype == torch.float16 != x.dtype:
        x = x.clamp(-LARGEST_HALF, LARGEST_HALF)
    return x.to(dtype)


def write(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of the caches with k, v [tokens, kv_heads, dim] at `slots` [tokens]."""
    keys, values = keys.clone(), values.clone()
    block_size = keys.shape[3]
    block, offset = slots // block_size, slots % block_size
    keys[block, :, :, offset] = narrow(k, keys.dtype)
    values[block, :, offset] = narrow(v, values.dtype)
    return keys, values

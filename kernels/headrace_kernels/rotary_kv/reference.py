"""Rotation of heads by position and the write to blocks, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


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


def write(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of the caches with k, v [tokens, kv_heads, dim] at `slots` [tokens]."""
    keys, values = keys.clone(), values.clone()
    block_size = keys.shape[3]
    block, offset = slots // block_size, slots % block_size
    keys[block, :, :, offset] = k
    values[block, :, offset] = v
    return keys, values

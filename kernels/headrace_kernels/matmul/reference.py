"""Products in plain torch, and GGUF's weight formats spelled out: the oracle and the portable path."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [rows, k] times weight [n, k] transposed, plus bias [n], plus residual [rows, n]; fp32."""
    y = torch.nn.functional.linear(x, weight, bias)
    return y if residual is None else y + residual


def quantize_q8_0(weight: Tensor) -> Tensor:
    """weight [n, k] fp32 → GGUF Q8_0 blocks [n, k/32 * 34] uint8: d = max|w| / 127, q = round(w / d)."""
    groups = _groups(weight)
    d = groups.abs().amax(-1, keepdim=True) / 127
    q = (groups * _inverse(d)).round().clamp(-127, 127).to(torch.int8)
    return _blocks(weight, [_half(d), q.view(torch.uint8)])


def quantize_q4_0(weight: Tensor) -> Tensor:
    """weight [n, k] → GGUF Q4_0 blocks [n, k/32 * 18]: w ≈ d (q - 8), d from the largest magnitude."""
    groups = _groups(weight)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    d = largest / -8
    q = (groups * _inverse(d) + 8.5).floor().clamp(0, 15).to(torch.uint8)
    return _blocks(weight, [_half(d), _nibbles(q)])


def quantize_q4_1(weight: Tensor) -> Tensor:
    """weight [n, k] → GGUF Q4_1 blocks [n, k/32 * 20]: w ≈ d q + m with m the group's minimum."""
    groups = _groups(weight)
    low = groups.amin(-1, keepdim=True)
    d = (groups.amax(-1, keepdim=True) - low) / 15
    q = ((groups - low) * _inverse(d) + 0.5).floor().clamp(0, 15).to(torch.uint8)
    return _blocks(weight, [_half(d), _half(low), _nibbles(q)])


def dequantize(blocks: Tensor, storage: str) -> Tensor:
    """GGUF blocks [n, bytes] uint8 of storage "q8_0", "q4_0" or "q4_1" → weights [n, k] fp32."""
    sizes = {"q8_0": 34, "q4_0": 18, "q4_1": 20}
    b = blocks.view(blocks.shape[0], -1, sizes[storage])
    d = b[..., 0:2].contiguous().view(torch.float16).float()
    if storage == "q8_0":
        return (d * b[..., 2:].contiguous().view(torch.int8).float()).flatten(1)
    packed = b[..., 2 if storage == "q4_0" else 4 :]
    q = torch.cat([packed & 15, packed >> 4], -1).float()
    if storage == "q4_0":
        return (d * (q - 8)).flatten(1)
    return (d * q + b[..., 2:4].contiguous().view(torch.float16).float()).flatten(1)


def _groups(weight: Tensor) -> Tensor:
    if weight.shape[1] % GROUP:
        raise ValueError(f"k = {weight.shape[1]} is not a multiple of {GROUP}")
    return weight.float().view(weight.shape[0], -1, GROUP)


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0.0, 1 / d)


def _half(x: Tensor) -> Tensor:
    return x.to(torch.float16).view(torch.uint8)


def _nibbles(q: Tensor) -> Tensor:
    return q[..., :16] | (q[..., 16:] << 4)


def _blocks(weight: Tensor, parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, -1).view(weight.shape[0], -1)

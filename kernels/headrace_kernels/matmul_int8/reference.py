"""Products with activations in bytes, in plain torch: what the integers and scales are, group by group."""

from __future__ import annotations

import torch
from torch import Tensor

from ..matmul.reference import GROUP, dequantize


def quantise_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, k] → bytes [rows, k/32, 32] as fp64 and scales [rows, k/32, 1]; x ≈ scale · byte."""
    groups = x.view(x.shape[0], -1, GROUP)
    top = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(top > 0, 127 / top, 0.0)
    return (groups * inverse).round().double(), top / 127


def linear(x: Tensor, blocks: Tensor, storage: str) -> Tensor:
    """x [rows, k] fp32 times GGUF blocks [n, …] of `storage`, with x rounded to bytes; [rows, n] in fp64."""
    q, scales = quantise_activations(x)
    return (q * scales).flatten(1) @ dequantize(blocks, storage).double().T

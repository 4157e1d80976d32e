"""act(gate) · up in Triton."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import CODES

BLOCK = 1024


@triton.jit
def _sigmoid(x):
    """Without overflow on either side."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _activate(x, CODE: tl.constexpr):
    if CODE == 0:
        y = x * _sigmoid(x)
    elif CODE == 1:
        bounded = tl.where(tl.abs(x) > 20.0, tl.where(x > 0, 20.0, -20.0), x)  # NaN stays
        inner = 0.7978845608028654 * (bounded + 0.044715 * bounded * bounded * bounded)
        y = x * _sigmoid(2.0 * inner)
    elif CODE == 2:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = tl.where(x < 0, 0.0, x)
    return y


@triton.jit
def _gated(
    gate_up,  # [rows, 2 · width]
    out,  # [rows, width]
    width,
    CODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (_activate(gate, CODE) * up).to(out.dtype.element_ty), mask=inside)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [rows, 2 · width], gates first → [rows, width]; computed in fp32."""
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError("gate_up must be contiguous [rows, 2 · width]")
    if activation not in CODES:
        raise ValueError(f"activation {activation!r} is none of {', '.join(CODES)}")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (rows, triton.cdiv(width, BLOCK))
        _gated[grid](gate_up, out, width, CODE=CODES[activation], BLOCK=BLOCK, enable_fp_fusion=False)
    return out

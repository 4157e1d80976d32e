"""RMS norm of rows in Triton: one program a row, which is summed in an order of its own width alone."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_device import block_of


@triton.jit
def _rms_norm(
    x,  # [rows, width]
    residual,  # [rows, width], changed
    weight,  # [width]
    out,  # [rows, width]
    width,
    epsilon,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    inside = at < width
    places = tl.program_id(0).to(tl.int64) * width + at
    h = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
        h = h.to(residual.dtype.element_ty)
        tl.store(residual + places, h, mask=inside)
        h = h.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(h * h, 0) / width + epsilon)
    y = h * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, y.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, residual: Tensor | None = None) -> Tensor:
    """x [rows, width] → norm of x, or of residual + x, which is left in `residual`; sums in fp32."""
    if x.ndim != 2 or not x.is_contiguous() or weight.shape != x.shape[1:]:
        raise ValueError("x must be contiguous [rows, width], weight [width]")
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError("residual must be contiguous and of x's shape")
    out = torch.empty_like(x)
    if x.shape[0]:
        block = block_of(x.shape[1])
        _rms_norm[(x.shape[0],)](
            x,
            x if residual is None else residual,
            weight,
            out,
            x.shape[1],
            epsilon,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 256)),
            enable_fp_fusion=False,
        )
    return out

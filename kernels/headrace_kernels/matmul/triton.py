"""y = x Wᵀ in Triton with rows that do not depend on how many rows there are.

Every program computes one tile of fixed size and adds its products along k in order; neither the tile nor
the order is a function of the row count. torch's own products choose both by it.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_device import widens

ROWS, COLUMNS, DEPTH = 16, 32, 64


@triton.jit
def _linear(
    x,  # [rows, k]
    weight,  # [n, k]
    bias,  # [n]
    residual,  # [rows, n]
    out,  # [rows, n]
    rows,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, k, DEPTH):
        inside = at + depth < k
        a = tl.load(
            x + row[:, None] * k + at + depth[None, :],
            mask=(row < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + column[None, :] * k + at + depth[:, None],
            mask=(column < n)[None, :] & inside[:, None],
            other=0.0,
        )
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    places = row[:, None] * n + column[None, :]
    inside = (row < rows)[:, None] & (column < n)[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x [rows, k] times weight [n, k] transposed, plus bias [n], plus residual [rows, n]; sums in fp32.

    The result is of x's dtype, or of `dtype`.
    """
    rows, k = x.shape
    n = weight.shape[0]
    if weight.shape != (n, k) or weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype} [n, {k}]")
    for name, t, shape in (
        ("x", x, x.shape),
        ("weight", weight, weight.shape),
        ("bias", bias, (n,)),
        ("residual", residual, (rows, n)),
    ):
        if t is not None and (t.shape != shape or not t.is_contiguous()):
            raise ValueError(f"{name} must be contiguous {tuple(shape)}")
    out = torch.empty(rows, n, dtype=dtype or x.dtype, device=x.device)
    if rows:
        _linear[(triton.cdiv(rows, ROWS), triton.cdiv(n, COLUMNS))](
            x,
            weight,
            x if bias is None else bias,
            x if residual is None else residual,
            out,
            rows,
            n,
            k,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            WIDEN=widens(x.dtype),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            DEPTH=DEPTH,
            num_warps=4,
            num_stages=4,
        )
    return out

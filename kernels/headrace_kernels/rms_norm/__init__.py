"""RMS norm of rows, with the residual added on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import Backend, backend
from . import reference


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, *, residual: Tensor | None = None, on: Backend | None = None
) -> Tensor:
    """x [rows, width] fp32 → norm of x, or of residual + x, which is left in `residual`."""
    for name, t, shape in (
        ("x", x, x.shape),
        ("weight", weight, x.shape[1:]),
        ("residual", residual, x.shape),
    ):
        if t is not None and (t.shape != shape or t.dtype != torch.float32 or not t.is_contiguous()):
            raise ValueError(f"{name} must be contiguous fp32 {tuple(shape)}")
    if x.ndim != 2:
        raise ValueError("x must be [rows, width]")
    out = torch.empty_like(x)
    (on or backend()).library.hr_rms_norm(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        x.shape[0],
        x.shape[1],
        epsilon,
        out.data_ptr(),
    )
    return out


__all__ = ["reference", "rms_norm"]

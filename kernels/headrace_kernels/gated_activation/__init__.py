"""act(gate) · up, the middle of a gated MLP."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..dispatch import Backend, backend
from . import reference

CODES: Final = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}


def gated_activation(gate_up: Tensor, activation: str, *, on: Backend | None = None) -> Tensor:
    """gate_up [rows, 2 · width] fp32, gates first → [rows, width]. CODES names the activations."""
    if (
        gate_up.dtype != torch.float32
        or gate_up.ndim != 2
        or gate_up.shape[1] % 2
        or not gate_up.is_contiguous()
    ):
        raise ValueError("gate_up must be contiguous fp32 [rows, 2 · width]")
    if activation not in CODES:
        raise ValueError(f"activation {activation!r} is none of {', '.join(CODES)}")
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    (on or backend()).library.hr_gated_activation(
        CODES[activation], gate_up.data_ptr(), gate_up.shape[0], out.shape[1], out.data_ptr()
    )
    return out


__all__ = ["CODES", "gated_activation", "reference"]

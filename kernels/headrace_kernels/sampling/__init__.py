"""What a sampler asks of rows of logits: each row by itself, in one pass over it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import Backend, backend
from . import reference


def argmax(logits: Tensor, *, on: Backend | None = None) -> tuple[Tensor, Tensor]:
    """logits [rows, width] fp32 → (first id of the largest, int64 [rows]; its value [rows]).

    A row with a NaN or an infinity gets -1 and NaN.
    """
    _check(logits)
    ids, maxima = torch.empty(logits.shape[0], dtype=torch.int64), torch.empty(logits.shape[0])
    (on or backend()).library.hr_argmax(
        logits.data_ptr(), logits.stride(0), *logits.shape, ids.data_ptr(), maxima.data_ptr()
    )
    return ids, maxima


def log_sum_exp(logits: Tensor, *, on: Backend | None = None) -> Tensor:
    """logits [rows, width] fp32 → [rows]: a token's log-probability is its logit less this."""
    _check(logits)
    out = torch.empty(logits.shape[0])
    (on or backend()).library.hr_log_sum_exp(
        logits.data_ptr(), logits.stride(0), *logits.shape, out.data_ptr()
    )
    return out


def _check(logits: Tensor) -> None:
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError("logits must be fp32 [rows, width] with adjacent columns")


__all__ = ["argmax", "log_sum_exp", "reference"]

"""What a sampler asks of logits, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """First index of each row's largest, and its value; -1 and NaN for a row that is not all finite."""
    finite = logits.isfinite().all(-1)
    clean = logits.nan_to_num()
    ids = torch.where(finite, clean.argmax(-1), -1)
    return ids, torch.where(finite, clean.amax(-1), torch.nan)


def log_sum_exp(logits: Tensor) -> Tensor:
    """[rows, width] → [rows]"""
    return torch.logsumexp(logits, -1)

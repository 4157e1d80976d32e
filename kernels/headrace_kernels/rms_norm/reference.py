"""RMS norm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> Tensor:
    """weight · h / sqrt(mean(h²) + epsilon) over the last dimension, h = x (+ residual); changes nothing."""
    h = x if residual is None else x + residual
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + epsilon) * weight

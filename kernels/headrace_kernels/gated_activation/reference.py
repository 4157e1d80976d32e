"""Gated activations in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import functional

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
}


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [rows, 2 · width] → act(first half) · second half."""
    gate, up = gate_up.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up

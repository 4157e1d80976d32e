"""Activation functions whose values do not depend on where in a tensor they stand.

torch computes silu, sigmoid, tanh-gelu and others with vector instructions, and what is left over at the end
of each thread's share with scalar ones, which round differently. So tensors are padded until every share is a
whole number of vectors; the usual sizes need no padding and no copy. (exp, tanh, sin, cos and erf do not have
this trait.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

VECTOR = 32  # elements: two AVX-512 registers of fp32, the unit of torch's vectorised loop
GRAIN = 32_768  # elements below which torch does not split a loop over threads
_MODULES = ("transformers.activations", "torch.nn.modules.activation")
_NOT_ELEMENTWISE = {"MultiheadAttention", "Softmax", "Softmax2d", "LogSoftmax", "Softmin", "GLU", "PReLU"}


class AlignedActivation(nn.Module):
    """An elementwise activation applied to a tensor padded to whole vectors for every thread."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        count = x.numel()
        padded = aligned_count(count, torch.get_num_threads())
        if padded == count:
            return self.activation(x.contiguous())
        flat = x.new_zeros(padded)
        flat[:count] = x.reshape(-1)
        return self.activation(flat)[:count].view(x.shape)


def aligned_count(count: int, threads: int) -> int:
    """The least count ≥ `count` that torch splits into whole vectors over its threads."""
    while True:
        shares = max(1, min(threads, -(-count // GRAIN)))
        padded = -(-count // (VECTOR * shares)) * VECTOR * shares
        if padded == count:
            return count
        count = padded


def align_activations(model: nn.Module) -> int:
    """Wrap every elementwise activation module of a CPU model; returns how many there were."""
    found = list(_activations(model))
    for parent, name, activation in found:
        setattr(parent, name, AlignedActivation(activation))
    return len(found)


def _activations(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            kind = type(child)
            if kind.__module__ in _MODULES and kind.__name__ not in _NOT_ELEMENTWISE:
                yield parent, name, child

"""What names a model's numbers: two workers with the same fingerprint give the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

NUMERICS_VERSION = 1  # raise it with any change that moves a bit of a logit or a draw
_SAMPLED_BYTES = 4096


def hash_weights(model: nn.Module) -> str:
    """A digest of all parameters and buffers: names, shapes, dtypes, a sum over all bytes, a sample of each.

    The sum changes with any flipped bit; the strided sample catches values that only changed places.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(_digest_bytes(tensor))
    return digest.hexdigest()


def make_fingerprint(weights: str, *, dtype: str, device: str, kernels: Iterable[str]) -> str:
    """16 hex digits over everything the promise of equal bits depends on."""
    parts = (weights, dtype, device, *kernels, f"torch {torch.__version__}", f"numerics {NUMERICS_VERSION}")
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return sorted([*model.named_parameters(), *model.named_buffers()])


def _digest_bytes(tensor: Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    words = raw[: len(raw) // 8 * 8].view(np.uint64)
    total = int(np.add.reduce(words)) if len(words) else 0
    step = max(1, len(raw) // _SAMPLED_BYTES)
    tail = raw[len(words) * 8 :].tobytes()
    return total.to_bytes(8, "little") + raw[::step].tobytes() + tail

"""Between host and device without waiting: neither the host for the device, nor the other way round.

An ordinary copy waits until the device has done all that was asked of it before.
"""

from __future__ import annotations

import torch
from torch import Tensor


def staged(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy in pinned memory, which is kept until it has been read; the tensor itself may change at once."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, once the device gets there."""
    return staged(tensor, device).to(device, non_blocking=True)


class Readout:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        on_gpu = tensor.device.type == "cuda"
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        self._host.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.Event() if on_gpu else None
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> list[int]:
        """Its numbers, waiting for this copy alone."""
        if self._done is not None:
            self._done.synchronize()
        return self._host.tolist()

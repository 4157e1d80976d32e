"""What Triton kernels must know of where they run. Import only where Triton is about to be used."""

from __future__ import annotations

import torch
import triton

# Decided when Triton is first imported in a process, as its own decorators do.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
WAVES = 2  # programs for each multiprocessor from which on more of them gain nothing


def widens(dtype: torch.dtype) -> bool:
    """Whether a product's operands become fp32 first: the interpreter multiplies bf16 as integers."""
    return INTERPRETED and dtype not in (torch.float32, torch.float16)


def wanted_programs(device: torch.device) -> int:
    """How many programs fill the device; 1 under the interpreter."""
    if device.type != "cuda":
        return 1
    return WAVES * torch.cuda.get_device_properties(device).multi_processor_count


def block_of(width: int, least: int = 16) -> int:
    """The power of two that holds `width`."""
    return max(least, 1 << max(0, width - 1).bit_length())

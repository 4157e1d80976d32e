"""Memory that was used while loading goes back to the system."""

from __future__ import annotations

import ctypes
import gc


def trim_memory() -> None:
    """Collects what refers to itself, and gives the allocator's free pages back. Without glibc: collects."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

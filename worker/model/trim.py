"""Memory that was used while loading goes back to the system."""

from __future__ import annotations

import ctypes


def trim_memory() -> None:
    """Gives the allocator's free pages back. Does nothing where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

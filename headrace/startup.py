"""What a process imports and loads before it serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def for_life() -> Iterator[None]:
    """What is made inside lives to the end: collecting it now and again costs start-up, and later a pause."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()

"""From other threads to the event loop, without giving the interpreter away.

`loop.call_soon_threadsafe` wakes the loop by a system call, during which Python's lock (the GIL) is free: the
loop takes it and goes on with what it was sent, and the engine's thread stands still until it is done, at
every step. Here the byte that wakes the loop is written by a C call that keeps the lock, so the engine goes
on; the loop has its turn while the step computes.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

_READ_BYTES = 4096

# PyDLL, unlike CDLL, does not release the lock around a call. If the pipe is full the loop is awake.
_write = ctypes.PyDLL(None).write
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class Mailbox:
    """Calls that other threads post and the loop makes, in the order in which they were posted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        # Not before nobody can post any more: the number of a closed file is soon another file's.
        weakref.finalize(self, _close, self._read_end, self._write_end)
        loop.add_reader(self._read_end, self._deliver)

    def post(self, callback: Callable[..., None], *args: object) -> None:
        """From any thread. Behind `close` nothing is delivered."""
        self._posted.append((callback, args))
        _write(self._write_end, b"\0", 1)

    def close(self) -> None:
        """On the loop's thread."""
        self._loop.remove_reader(self._read_end)

    def _deliver(self) -> None:
        # First the bytes, then the calls: one posted in between wakes the loop once more, and none is left.
        os.read(self._read_end, _READ_BYTES)
        while self._posted:
            callback, args = self._posted.popleft()
            try:
                callback(*args)
            except Exception as error:  # as the loop treats a callback's: said, and the others go on
                self._loop.call_exception_handler({"message": "a posted call failed", "exception": error})


def _close(*files: int) -> None:
    for file in files:
        os.close(file)

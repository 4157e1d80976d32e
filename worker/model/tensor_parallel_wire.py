"""What the processes of one model say to each other beside tensors: small frames over a pair of sockets.

    follower: Loaded          its model fits              leader: Meeting    where the group meets
    follower: Packed          it has its share            leader: NewCache, Step, Step, …    until it closes

A frame is its length and a msgpack map; whole numbers of a step are little-endian int32. Nothing is pickled.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

_LENGTH = struct.Struct("<Q")
M = TypeVar("M")
Copies = tuple[tuple[int, int], ...]  # blocks (source, destination), copied as if all at once


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a follower is to load, and how. Its first frame."""

    rank: int
    size: int
    path: str
    device: str
    dtype: str
    threads: int
    trust_remote_code: bool
    cache_dir: str | None


class Loaded(msgspec.Struct, frozen=True):
    """`error`: why it cannot be; empty when all is well."""

    error: str = ""


class Meeting(msgspec.Struct, frozen=True):
    port: int  # on the loopback interface


class Packed(msgspec.Struct, frozen=True):
    exact: bool  # its products' rows do not depend on how many there are


class NewCache(msgspec.Struct, frozen=True, tag=True):
    """From now on steps are about this KV cache, of which each process keeps its heads' share."""

    num_blocks: int
    block_size: int
    dtype: str


class Step(msgspec.Struct, frozen=True, tag=True):
    """Of S sequences, T tokens and R rows whose logits are wanted; all packed by `pack_numbers`."""

    token_ids: bytes  # [T]
    lens: bytes  # [S]
    starts: bytes  # [S]
    tables: bytes  # the block tables, one after another
    table_lens: bytes  # [S]
    rows: bytes  # [R]
    copies: tuple[Copies, ...] = ()  # in order, before anything is computed


def pack_numbers(numbers: npt.ArrayLike) -> bytes:
    return np.asarray(numbers).astype("<i4").tobytes()


def unpack_numbers(packed: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(packed, "<i4").astype(np.int64)


class Channel:
    """One end of a pair of sockets. Frames arrive whole, in order, or not at all."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._reader = end.makefile("rb")

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError where nobody is at the other end."""
        self.send_frame(to_frame(message))

    def send_frame(self, frame: bytes) -> None:
        self._socket.sendall(frame)

    def receive(self, kind: type[M] | Any) -> M | None:
        """The next message; None when the other end has closed."""
        head = self._reader.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        body = self._reader.read(length)
        return None if len(body) < length else msgspec.msgpack.decode(body, type=kind)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


def to_frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def broadcast(channels: Iterable[Channel], message: msgspec.Struct) -> None:
    frame = to_frame(message)
    for channel in channels:
        channel.send_frame(frame)

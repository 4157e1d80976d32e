"""Where the server is that a connection needs, when it may change: asked of sentinels, or of a cluster.

A place answers from what it knows, or says whom to ask and reads the reply. Connections ask, so that one
and the same place serves asyncio and threads.
"""

from __future__ import annotations

import binascii
import random
import re
from typing import Any, Protocol

import redis
from redis.exceptions import AskError, ClusterDownError, ReadOnlyError, ResponseError, TryAgainError

from headrace.redis_url import Address

NUM_SLOTS = 16_384
# Errors of a server that is not, or not yet, the right one. In a script of Redis 6.2 they follow a "-".
_ELSEWHERE = re.compile(r"(?:^|[ -])(?:READONLY|NOREPLICAS|UNBLOCKED) ")


def key_slot(key: str | bytes) -> int:
    """The slot of a key: of its hash tag, the part in the first braces, if it has one."""
    raw = key.encode() if isinstance(key, str) else bytes(key)
    start = raw.find(b"{")
    if start >= 0 and (end := raw.find(b"}", start + 1)) > start + 1:
        raw = raw[start + 1 : end]
    return binascii.crc_hqx(raw, 0) % NUM_SLOTS


def is_read_only(error: ResponseError) -> bool:
    return isinstance(error, ReadOnlyError) or re.search(r"(?:^|[ -])READONLY ", str(error)) is not None


def is_elsewhere(error: ResponseError) -> bool:
    """Whether another server may take the command: this one refused it and has done nothing."""
    if isinstance(error, ReadOnlyError | AskError | TryAgainError | ClusterDownError):
        return True
    return _ELSEWHERE.search(str(error)) is not None


class Asks(Protocol):
    """Makes connections to those that are asked."""

    def connection_sync(self, address: Address) -> redis.Connection: ...


class Place(Protocol):
    """`query` is the command that asks for it; `absent` what to say when nobody can tell."""

    @property
    def query(self) -> tuple[str, ...]: ...

    master_only: bool
    absent: str

    def known(self) -> Address | None:
        """Where it is, as far as that may be believed."""

    def seeds(self) -> list[Address]:
        """Whom to ask, in this order."""

    def read(self, reply: Any, asked: Address) -> Address | None:
        """Where it is according to `asked`; None if that one cannot tell."""

    def doubt(self) -> None:
        """It was not there: what is known may be old."""

    def arrived(self, asking: Asks) -> None:
        """Somebody has connected there."""

    def left(self, address: Address) -> bool:
        """Whether it is known to be no longer at `address`."""


class SlotMap:
    """Which node of a cluster serves which slot. Believed until a node says otherwise or does not answer."""

    def __init__(self, nodes: tuple[Address, ...]) -> None:
        self._configured = nodes
        self._owners: list[Address | None] = []
        self._nodes: list[Address] = []
        self._fresh = False

    @property
    def masters(self) -> list[Address]:
        return sorted({owner for owner in self._owners if owner is not None})

    def owner(self, slot: int | None, avoid: Address | None = None) -> Address | None:
        """None: to be asked for. For no slot any master, another than `avoid` if there is one."""
        if not self._fresh:
            return None
        if slot is not None:
            return self._owners[slot]
        masters = self.masters
        return random.choice([master for master in masters if master != avoid] or masters)  # noqa: S311

    def seeds(self) -> list[Address]:
        others = [node for node in self._configured if node not in self._nodes]
        return [*random.sample(self._nodes, len(self._nodes)), *others]

    def read(self, reply: Any, asked: Address) -> None:
        """The reply to CLUSTER SLOTS. A node that does not know its own address has that which was asked."""
        owners: list[Address | None] = [None] * NUM_SLOTS
        nodes: list[Address] = []
        for first, last, *serving in reply or ():
            found = [((node[0] or b"").decode() or asked[0], int(node[1])) for node in serving]
            owners[first : last + 1] = [found[0]] * (last + 1 - first)
            nodes += [node for node in found if node not in nodes]
        if nodes:
            self._owners, self._nodes, self._fresh = owners, nodes, True

    def move(self, slot: int, owner: Address) -> None:
        """A node said of one slot where it is; others may have moved as well."""
        if self._fresh:
            self._owners[slot] = owner

    def forget(self) -> None:
        self._fresh = False


class SlotOwner:
    """The node that serves a slot, or, for no slot, any master."""

    query = ("CLUSTER", "SLOTS")
    master_only = False  # a replica says by itself where the slot is

    def __init__(self, slots: SlotMap, slot: int | None) -> None:
        self._slots = slots
        self._slot = slot
        self._found: Address | None = None
        self._avoid: Address | None = None  # where it was when somebody found nothing there
        self.absent = "no node of the cluster knows who serves " + (
            "anything" if slot is None else f"slot {slot}"
        )

    def known(self) -> Address | None:
        self._found = self._slots.owner(self._slot, self._avoid)
        return self._found

    def seeds(self) -> list[Address]:
        return self._slots.seeds()

    def read(self, reply: Any, asked: Address) -> Address | None:
        self._slots.read(reply, asked)
        return self.known()

    def doubt(self) -> None:
        self._avoid = self._found
        self._slots.forget()

    def arrived(self, asking: Asks) -> None:
        pass

    def left(self, address: Address) -> bool:
        return False  # a node tells by itself

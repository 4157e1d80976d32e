"""A client of Redis Cluster: each command goes to the node of its key.

redis-py's own has no pub/sub for asyncio and repeats commands whose reply was lost; here only what a node
refused is sent again. MOVED and ASK are followed; a script whose slot is on its way (TRYAGAIN) waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError, ResponseError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.connections import Asking
from headrace.places import SlotMap, SlotOwner, key_slot
from headrace.redis_url import Address

T = TypeVar("T")
Command = tuple[tuple[Any, ...], Mapping[str, Any]]

MOST_TRIES = 16
TRY_AGAIN_S = 0.05
_KEYLESS = frozenset(
    {"ACL", "CLIENT", "CONFIG", "DBSIZE", "ECHO", "FLUSHALL", "INFO", "PING", "PUBLISH", "PUBSUB", "SCRIPT"}
    | {"CLUSTER", "COMMAND", "KEYS", "ROLE", "SLOWLOG", "TIME", "WAIT"}
)
_HARMLESS = frozenset({"PING", "TIME"})
_EVERYWHERE = frozenset({"SCRIPT LOAD", "SCRIPT FLUSH", "FLUSHALL", "PUBSUB NUMSUB"})


def key_of(args: Sequence[Any]) -> str | bytes | None:
    """The key by which a command is sent, its first; of SCAN the pattern, whose tag is that of what it finds.

    None for a command without keys. Whether other keys have the same slot is for the node to check.
    """
    name = _text(args[0])
    if name in ("EVAL", "EVALSHA"):
        return args[3] if int(args[2]) else None
    if name in ("XREAD", "XREADGROUP", "SCAN"):
        word = "MATCH" if name == "SCAN" else "STREAMS"
        places = [at for at, arg in enumerate(args) if isinstance(arg, str | bytes) and _text(arg) == word]
        return args[places[0] + 1] if places else None
    if name.split()[0] in _KEYLESS or len(args) < 2:
        return None
    key: str | bytes = args[1]
    return key


def _text(word: str | bytes) -> str:
    return (word.decode(errors="replace") if isinstance(word, bytes) else str(word)).upper()


class ClusterRedis(Redis):
    """As `redis.asyncio.Redis`, save that WATCH needs a client made with a tag.

    A pipeline is split by node, and one with `transaction=True` must have keys of one slot. `pubsub()` and
    commands without keys go to any master: channels are the whole cluster's.
    """

    def __init__(
        self,
        slots: SlotMap,
        asking: Asking,
        anywhere: ConnectionPool,
        pool_of: Callable[[Address], ConnectionPool],
    ) -> None:
        super().__init__(connection_pool=anywhere)
        self._slots = slots
        self._asking = asking
        self._pool_of = pool_of
        self._nodes: dict[Address, Redis] = {}
        self._looking = asyncio.Lock()

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        await self.connection_pool.aclose()
        nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            await node.connection_pool.aclose()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        if _text(args[0]) in _EVERYWHERE:
            return await self._everywhere(args, options)
        key = key_of(args)
        if key is None:
            if _text(args[0]) in _HARMLESS:
                with suppress(RedisConnectionError, OSError):  # of one node, while others may answer
                    return await super().execute_command(*args, **options)
            return await super().execute_command(*args, **options)
        return await self.routed(
            key_slot(key),
            lambda node: node.execute_command(*args, **options),
            lambda node: _asked(node, (args, options)),
        )

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> ClusterPipeline:
        return ClusterPipeline(self, transaction)

    async def routed(
        self,
        slot: int,
        call: Callable[[Redis], Awaitable[T]],
        ask: Callable[[Redis], Awaitable[T]] | None = None,
    ) -> T:
        """`call` on the node that has `slot`, wherever that is; `ask` on one that is just receiving it.

        Raises ConnectionError when no node takes it: the slot is on its way, or nobody serves it for now.
        """
        trouble: Exception | None = None
        for _ in range(MOST_TRIES):
            address = await self.owner(slot)
            try:
                return await call(self.node(address))
            except MovedError as moved:
                self._slots.move(slot, (moved.host or address[0], moved.port))
                trouble = moved
            except (AskError, TryAgainError) as moving:
                trouble = moving
                if isinstance(moving, AskError) and ask is not None:
                    with suppress(MovedError, TryAgainError):
                        return await ask(self.node((moving.host or address[0], moving.port)))
                await asyncio.sleep(TRY_AGAIN_S)
            except ClusterDownError as down:
                trouble = down
                break
            except (RedisConnectionError, RedisTimeoutError, OSError):
                self._slots.forget()
                raise
        self._slots.forget()
        raise RedisConnectionError(f"no node of the cluster takes slot {slot}: {trouble}") from trouble

    def doubt(self) -> None:
        """A node did not answer: where things are is asked again before the next command."""
        self._slots.forget()

    async def owner(self, slot: int | None) -> Address:
        """The node of a slot, asked for if need be by one caller for all."""
        if (known := self._slots.owner(slot)) is not None:
            return known
        async with self._looking:
            found = await self._asking.find(SlotOwner(self._slots, slot))
            await self._leave_old()
        return found

    def node(self, address: Address) -> Redis:
        """A client of one node."""
        if address not in self._nodes:
            self._nodes[address] = Redis(connection_pool=self._pool_of(address))
        return self._nodes[address]

    async def _leave_old(self) -> None:
        """Closes idle connections to nodes that have no slots any more; commands under way end first."""
        masters = set(self._slots.masters)
        for address in [address for address in self._nodes if address not in masters]:
            await self._nodes.pop(address).connection_pool.disconnect(inuse_connections=False)

    async def _everywhere(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        await self.owner(None)
        nodes = [self.node(address) for address in self._slots.masters]
        try:
            replies = await asyncio.gather(*(node.execute_command(*args, **options) for node in nodes))
        except (RedisConnectionError, RedisTimeoutError, OSError):
            self._slots.forget()
            raise
        if _text(args[0]) != "PUBSUB NUMSUB":
            return replies[0]
        return [(rows[0][0], sum(count for _, count in rows)) for rows in zip(*replies, strict=True)]


class ClusterPipeline(Pipeline):
    """Commands that wait for `execute`, in the order of their replies."""

    def __init__(self, cluster: ClusterRedis, transaction: bool) -> None:
        super().__init__(cluster.connection_pool, cluster.response_callbacks, transaction, None)
        self._cluster = cluster

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if _text(args[0]) == "WATCH":
            raise RedisError("WATCH needs the connections of one node: a client made with a tag")
        return self.pipeline_execute_command(*args, **options)

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        stack: list[Command] = list(self.command_stack)
        await self.reset()
        if not stack:
            return []
        if self.is_transaction:
            return await self._transaction(stack, raise_on_error)
        parts = await self._parts(stack)
        replies: dict[int, Any] = {}
        work = [self._part(node, numbers, stack, replies) for node, numbers in parts.items()]
        for outcome in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(outcome, BaseException):
                self._cluster.doubt()
                raise outcome
        found = [replies[number] for number in range(len(stack))]
        if raise_on_error:
            self.raise_first_error(stack, found)
        return found

    async def _transaction(self, stack: list[Command], raise_on_error: bool) -> list[Any]:
        slots = {key_slot(key) for args, _ in stack if (key := key_of(args)) is not None}
        if len(slots) != 1:
            raise RedisError("the keys of a transaction must have one slot")

        def call(node: Redis) -> Coroutine[Any, Any, list[Any]]:
            pipe = node.pipeline(transaction=True)
            pipe.command_stack = [_copy(command) for command in stack]
            return pipe.execute(raise_on_error)

        return await self._cluster.routed(slots.pop(), call)

    async def _parts(self, stack: list[Command]) -> dict[Address, list[int]]:
        """The commands' numbers by node; those without a key go with others."""
        parts: dict[Address, list[int]] = {}
        keyless = []
        for number, (args, _) in enumerate(stack):
            if (key := key_of(args)) is None:
                keyless.append(number)
            else:
                parts.setdefault(await self._cluster.owner(key_slot(key)), []).append(number)
        if keyless:
            node = next(iter(parts), None) or await self._cluster.owner(None)
            parts[node] = sorted([*parts.get(node, ()), *keyless])
        return parts

    async def _part(
        self, address: Address, numbers: list[int], stack: list[Command], replies: dict[int, Any]
    ) -> None:
        pipe = self._cluster.node(address).pipeline(transaction=False)
        pipe.command_stack = [_copy(stack[number]) for number in numbers]
        found = await pipe.execute(raise_on_error=False)
        for number, reply in zip(numbers, found, strict=True):
            replies[number] = reply
            if isinstance(reply, AskError | TryAgainError | ClusterDownError):
                args, options = _copy(stack[number])
                try:
                    replies[number] = await self._cluster.execute_command(*args, **options)
                except ResponseError as error:
                    replies[number] = error


def _copy(command: Command) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, options = command
    return args, dict(options)  # redis-py takes things out of them while it reads a reply


async def _asked(node: Redis, command: Command) -> Any:
    """One command on a node that is receiving its slot."""
    args, options = command
    pipe = node.pipeline(transaction=False)
    pipe.execute_command("ASKING")
    pipe.execute_command(*args, **options)
    _, reply = await pipe.execute()
    return reply

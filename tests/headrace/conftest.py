"""Scripts on Redis 7.0 and 6.2, and on Valkey if there is one; none may touch a key it does not declare."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
import redis.asyncio

from headrace import script_runner
from headrace.connect import connect
from headrace.keys import Keys
from headrace.log import read_log
from headrace.lua_source import LuaSource, load_script
from headrace.messages import Delta, End, Event, Finish, Usage
from headrace.script_types import Claimed, EmitItem, Entry, Final
from headrace.scripts import Scripts

LEASE_MS = 60_000

# Every call must name a declared key, and none may be made before KEYS is known.
GUARD = """
local declared, real = {}, redis
for _, key in ipairs(KEYS) do declared[key] = true end
local KEYLESS = {TIME = true}
local AT = {XREADGROUP = 'streams', XGROUP = 2, XINFO = 2, MEMORY = 2}
local function check(command, ...)
  local arguments = {...}
  if KEYLESS[command] then return end
  local key = arguments[AT[command] or 1]
  if AT[command] == 2 then key = arguments[2] end
  if AT[command] == 'streams' then
    for i, value in ipairs(arguments) do if value == 'STREAMS' then key = arguments[i + 1] end end
  end
  if not declared[key] then error('UNDECLARED key ' .. tostring(key) .. ' of ' .. command) end
end
local redis = {
  call = function(...) check(...) return real.call(...) end,
  pcall = function(...) check(...) return real.pcall(...) end,
  error_reply = real.error_reply,
}
"""


KINDS = ["default", "bundled", *(["valkey"] if shutil.which("valkey-server") else [])]


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, redis_servers: Callable[[str], Any]) -> Any:
    return redis_servers(request.param)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts under this fixture fail on any key that KEYS does not hold."""

    def load(name: str) -> LuaSource:
        text = GUARD + load_script(name).text
        return LuaSource(text, hashlib.sha1(text.encode()).hexdigest())

    monkeypatch.setattr(script_runner, "load_script", load)


class Pool:
    """One pool seen by a test: plain Redis for the producer, scripts for the worker."""

    def __init__(self, client: redis.asyncio.Redis, server: Any) -> None:
        self.redis = client
        self.server = server
        self.keys = Keys("t")
        self.scripts = Scripts(client, self.keys)

    async def add(self, job_class: str = "normal", entry_id: str = "*", **fields: Any) -> str:
        """XADD by hand; the entry's id."""
        reply = await self.redis.xadd(self.keys.queue(job_class), fields or {"prompt": "hi"}, id=entry_id)
        return reply.decode()

    async def pick(self, n: int = 1, worker: str = "w1", **options: Any) -> list[Entry]:
        settings = {"budget_tokens": 1_000_000, "lease_ms": LEASE_MS, **options}
        return (await self.scripts.pick(worker, n, **settings)).entries

    async def claim(self, entries: list[Entry], worker: str = "w1", **options: Any) -> list[Claimed]:
        settings = {"lease_ms": LEASE_MS, "max_attempts": 3, **options}
        items = [(e.job_class, e.entry_id, job_id(e), ttl_of(e)) for e in entries]
        return await self.scripts.claim(worker, items, **settings)

    async def take(self, worker: str = "w1", **options: Any) -> tuple[Entry, Claimed]:
        (entry,) = await self.pick(1, worker)
        (claimed,) = await self.claim([entry], worker, **options)
        return entry, claimed

    async def emit(self, *items: EmitItem) -> list[str]:
        return [outcome.kind for outcome in await self.scripts.emit(items, retention_ms=60_000)]

    async def job(self, job_id: str) -> dict[str, str]:
        raw: Mapping[bytes, bytes] = await self.redis.hgetall(self.keys.job(job_id))  # type: ignore[misc]
        return {name.decode(): value.decode() for name, value in raw.items()}

    async def log(self, job_id: str) -> list[Event]:
        return await read_log(self.redis, self.keys, job_id)

    async def expire_leases(self) -> None:
        for member in await self.redis.zrange(self.keys.leases, 0, -1):
            await self.redis.zadd(self.keys.leases, {member: 1})

    async def assert_no_entries_left(self) -> None:
        """After everything ended: no entry, nothing pending, no zset, and a TTL on every job and log."""
        for job_class in ("high", "normal", "low"):
            queue = self.keys.queue(job_class)
            if await self.redis.exists(queue):
                assert await self.redis.xlen(queue) == 0
                assert [group["pending"] for group in await self.redis.xinfo_groups(queue)] in ([0], [])
            assert await self.redis.zcard(self.keys.ready(job_class)) == 0
        for key in (self.keys.leases, self.keys.deadlines, self.keys.ids):
            assert not await self.redis.exists(key), key
        for pattern in (self.keys.job("*"), self.keys.log("*")):
            for key in await self.redis.keys(pattern):
                assert await self.redis.pttl(key) > 0, key


def job_id(entry: Entry) -> str:
    return entry.fields.get(b"id", entry.member.encode()).decode()


def ttl_of(entry: Entry) -> int | None:
    return int(entry.fields[b"ttl_ms"]) if b"ttl_ms" in entry.fields else None


def usage(completion: int, prompt: int = 3) -> Usage:
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def delta(seq: int, text: str = "x", ids: list[int] | None = None) -> Delta:
    return Delta(seq=seq, text=text, ids=[seq] if ids is None else ids)


def ending(seq: int, completion: int = 0) -> list[Event]:
    return [Finish(seq=seq, reason="stop"), End(seq=seq + 1, status="done", usage=usage(completion))]


def cancelled(seq: int, completion: int) -> End:
    return End(seq=seq, status="cancelled", usage=usage(completion))


def item(entry: Entry, claimed: Claimed, events: list[Event], **options: Any) -> EmitItem:
    last = events[-1]
    final = options.pop("final", None)
    if final is None and isinstance(last, End):
        final = Final(last.status, last.usage, None, last.error)
    return EmitItem(
        claimed.job_id,
        entry.job_class,
        entry.entry_id,
        claimed.epoch,
        events,
        final,
        prompt_tokens=3,
        **options,
    )


@pytest.fixture
async def pool(server: Any, guarded: None) -> AsyncIterator[Pool]:
    client = connect(server.unix_url)
    yield Pool(client, server)
    await client.aclose()


@pytest.fixture
def kit() -> Any:
    """The factories above, for tests that cannot import a conftest."""
    return sys.modules[__name__]

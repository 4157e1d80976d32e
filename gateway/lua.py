"""The gateway's own scripts, in headrace/lua/gateway: each is one atomic change, with every key declared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from headrace.lua_source import load_script


async def run_script(redis: Redis, name: str, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
    """By SHA, or by the whole text after a SCRIPT FLUSH. All of them may be repeated after a lost reply."""
    script = load_script(f"gateway/{name}")
    try:
        return await redis.evalsha(script.sha, len(keys), *keys, *args)  # type: ignore[misc]
    except NoScriptError:
        return await redis.eval(script.text, len(keys), *keys, *args)  # type: ignore[misc]


async def redis_now_ms(redis: Redis) -> int:
    """Redis's clock, the only one that counts, ms."""
    seconds, micros = await redis.time()
    return int(seconds) * 1000 + int(micros) // 1000

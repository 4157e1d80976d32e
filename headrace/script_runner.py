"""One call of a script: by SHA, and with its whole text where the server does not know it (any more)."""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError

from headrace.lua_source import load_script
from headrace.script_calls import Call


async def run(redis: redis.asyncio.Redis, name: str, call: Call) -> Any:
    """The reply of the script `name`. Raises what the client does; a full or read-only server as that."""
    script = load_script(name)
    keys, args = call
    try:
        try:
            return await redis.evalsha(script.sha, len(keys), *keys, *args)  # type: ignore[misc]
        except NoScriptError:
            return await redis.eval(script.text, len(keys), *keys, *args)  # type: ignore[misc]
    except ResponseError as error:
        raise _clearer(error) from error


def run_sync(redis: redis.Redis, name: str, call: Call) -> Any:
    """As `run`, over a synchronous client."""
    script = load_script(name)
    keys, args = call
    try:
        try:
            return redis.evalsha(script.sha, len(keys), *keys, *args)
        except NoScriptError:
            return redis.eval(script.text, len(keys), *keys, *args)
    except ResponseError as error:
        raise _clearer(error) from error


def _clearer(error: ResponseError) -> Exception:
    """Errors raised inside a script lose their class on the way; the server's state must stay visible."""
    text = str(error)
    for token, kind in (("OOM ", OutOfMemoryError), ("READONLY ", ReadOnlyError)):
        if token in text:
            return kind(text)
    return error

"""Which Redis and pool a command talks to, and one-line errors when it cannot."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import redis
import typer

from headrace.cli.options import tell_error, with_one_line_errors
from headrace.config import CommonSettings, ConfigError, default_cache_dir, load_settings, redact_url
from headrace.errors import HeadraceError
from headrace.logs import configure_logging

RedisUrl = Annotated[
    str | None, typer.Option(help="Redis; not set: HEADRACE_REDIS_URL, else that of `headrace up`.")
]
Pool = Annotated[str | None, typer.Option(help="Name of the pool.  [default: smollm2, env: HEADRACE_POOL]")]
EXIT_FAILED = 1


def run_against(
    redis_url: str | None, pool: str | None, action: Callable[[CommonSettings], Awaitable[int]]
) -> None:
    """Runs `action` with the settings and exits with its status; a refusal or a lost Redis is one line."""

    def guarded() -> int:
        settings = _settings(redis_url, pool)
        configure_logging(settings.log_format, "warning")  # standard output is the command's own
        try:
            return asyncio.run(_as_coroutine(action, settings))
        except HeadraceError as refusal:
            tell_error(str(refusal))
        except (redis.RedisError, OSError) as problem:
            tell_error(f"no answer from Redis at {redact_url(settings.redis_url)}: {problem}")
        except KeyboardInterrupt:
            return 130
        return EXIT_FAILED

    with_one_line_errors(guarded)


async def _as_coroutine(action: Callable[[CommonSettings], Awaitable[int]], settings: CommonSettings) -> int:
    return await action(settings)


def _settings(redis_url: str | None, pool: str | None) -> CommonSettings:
    known = redis_url or os.environ.get("HEADRACE_REDIS_URL") or _url_of_up()
    if known is None:
        raise ConfigError("which Redis? Start `headrace up`, or set HEADRACE_REDIS_URL or --redis-url")
    return load_settings(CommonSettings, os.environ, {"redis_url": known, "pool": pool})


def _url_of_up() -> str | None:
    """The Redis that `headrace up` runs, or ran last, for this user."""
    folder = Path(os.environ.get("HEADRACE_CACHE_DIR") or default_cache_dir()).expanduser()
    try:
        return str(json.loads((folder / "redis" / "server.json").read_text())["url"])
    except (OSError, ValueError, KeyError):
        return None

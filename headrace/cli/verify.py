"""`headrace verify`: a finished job is run again, alone, by a process that loads the model, and compared."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

from headrace.cli.connection import Pool, RedisUrl, run_against
from headrace.config import CommonSettings, env_name


def register(app: typer.Typer) -> None:
    app.command()(verify)


def verify(
    job: Annotated[str, typer.Argument(help="Id of a job that has ended.")],
    redis_url: RedisUrl = None,
    pool: Pool = None,
    model: Annotated[str | None, typer.Option(help="The pool's model; not set: the demo model.")] = None,
) -> None:
    """Run a finished job again, alone, and compare tokens and log-probabilities bit for bit."""

    async def action(settings: CommonSettings) -> int:
        chosen = {"redis_url": settings.redis_url, "pool": settings.pool, "model": model}
        env = dict(os.environ) | {env_name(k): v for k, v in chosen.items() if v is not None}
        # A process of its own: this package knows nothing of models.
        return subprocess.run([sys.executable, "-m", "worker.verify", job], env=env, check=False).returncode  # noqa: ASYNC221 nothing else runs here

    run_against(redis_url, pool, action)

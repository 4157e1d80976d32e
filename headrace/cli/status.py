"""`headrace workers` and `headrace queue`: who serves a pool, and what waits."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from headrace.cli.connection import EXIT_FAILED, Pool, RedisUrl, run_against
from headrace.config import CommonSettings, host_part
from headrace.connect import connect
from headrace.keys import POOLS, Keys
from headrace.messages import CLASSES


def register(app: typer.Typer) -> None:
    for command in (workers, queue):
        app.command()(command)


def workers(
    redis_url: RedisUrl = None,
    pool: Pool = None,
    here: Annotated[bool, typer.Option(help="Only those on this host; status 1 when there is none.")] = False,
) -> None:
    """List the workers of a pool with what their cards say."""

    async def action(settings: CommonSettings) -> int:
        redis = connect(settings.redis_url)
        try:
            cards = await read_cards(redis, Keys(settings.pool))
        finally:
            await redis.aclose()
        shown = {name: card for name, card in cards.items() if not here or name.startswith(host_part() + "-")}
        for worker_id, card in sorted(shown.items()):
            typer.echo(" ".join([worker_id, *(f"{name}={value}" for name, value in sorted(card.items()))]))
        if not shown:
            typer.echo(f"pool {settings.pool} has no worker" + (" on this host" if here else ""), err=True)
        return EXIT_FAILED if here and not shown else 0

    run_against(redis_url, pool, action)


def queue(redis_url: RedisUrl = None) -> None:
    """Show for each pool how many jobs are queued and running, and what was given up."""

    async def action(settings: CommonSettings) -> int:
        redis = connect(settings.redis_url)
        try:
            names = {settings.pool} | {name.decode() for name in await _any(redis.smembers(POOLS))}
            Console(soft_wrap=True).print(await _table(redis, sorted(names)))
        finally:
            await redis.aclose()
        return 0

    run_against(redis_url, None, action)


async def read_cards(redis: Redis, keys: Keys) -> dict[str, dict[str, str]]:
    """The cards of the workers that live: worker id → fields."""
    ids = [raw.decode() for raw in await redis.zrange(keys.workers, 0, -1)]
    cards = {}
    for worker_id in ids:
        card = await _any(redis.hgetall(keys.worker(worker_id)))
        if card:
            cards[worker_id] = {name.decode(): value.decode(errors="replace") for name, value in card.items()}
    return cards


async def _table(redis: Redis, pools: list[str]) -> Table:
    headings = ["pool", *CLASSES, "running", "workers", "dead", "undecodable"]
    table = Table(*headings, box=None, pad_edge=False)
    for pool in pools:
        keys = Keys(pool)
        # Entries stay in their stream until their job has ended, so these hold the running ones too.
        entries = [await redis.xlen(keys.queue(job_class)) for job_class in CLASSES]
        running = await redis.zcard(keys.leases)
        alive = len(await read_cards(redis, keys))
        lost = [await redis.xlen(keys.dead), await redis.xlen(keys.undecodable)]
        table.add_row(pool, *map(str, [*entries, running, alive, *lost]))
    return table


def _any(reply: Any) -> Any:
    """redis-py types one reply for its synchronous and its asynchronous client."""
    return reply

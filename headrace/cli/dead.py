"""`headrace dead`: what was given up, and what nobody could read. List, show, replay, drop."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from headrace.cli.connection import EXIT_FAILED, Pool, RedisUrl, run_against
from headrace.client import new_job_id
from headrace.config import CommonSettings
from headrace.connect import connect
from headrace.errors import HeadraceError
from headrace.keys import Keys
from headrace.messages import CLASSES

HEADER = ("job", "class", "entry", "attempt", "at", "history")
PAGE = 1000
RAW_RANGE = "return redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])"

app = typer.Typer(no_args_is_help=True, help="Jobs given up as poison (or --undecodable entries).")
Undecodable = Annotated[bool, typer.Option("--undecodable", help="Entries that nobody could read.")]
Ids = Annotated[list[str], typer.Argument(help="Ids as `list` shows them.")]


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead entry: what was noted of it, and its fields as they came, in order."""

    id: str
    header: dict[str, str]
    fields: list[tuple[bytes, bytes]]


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="dead")


async def read_letters(redis: Redis, keys: Keys, undecodable: bool, only: str | None = None) -> list[Letter]:
    """All letters, or the one called `only`. Raises HeadraceError `invalid_request` if there is none."""
    key, first, letters = keys.undecodable if undecodable else keys.dead, only or "-", []
    while True:
        # Raw: a mapping would lose fields that come twice.
        page: Any = await redis.eval(RAW_RANGE, 1, key, first, only or "+", str(PAGE))  # type: ignore[misc]
        letters += [_letter(entry_id.decode(), flat, undecodable) for entry_id, flat in page]
        if only or len(page) < PAGE:
            break
        first = f"({page[-1][0].decode()}"
    if only and not letters:
        raise HeadraceError("invalid_request", f"There is no entry {only} in {key}.")
    return letters


def _letter(entry_id: str, flat: Sequence[bytes], undecodable: bool) -> Letter:
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    header: dict[str, str] = {}
    while not undecodable and len(header) < len(HEADER) and pairs:
        name = pairs[0][0].decode("utf-8", "replace")
        if name != HEADER[len(header)]:
            break
        header[name] = pairs.pop(0)[1].decode("utf-8", "replace")
    return Letter(entry_id, header, pairs)


async def replay(redis: Redis, keys: Keys, letter: Letter, job_class: str, *, undecodable: bool) -> str:
    """Submits the entry again under a new id, and drops the letter, both or neither. Returns the job's id."""
    job_id = new_job_id()
    # A name given twice counts the first time.
    fields = dict(reversed([pair for pair in letter.fields if pair[0] != b"id"])) | {b"id": job_id.encode()}
    async with redis.pipeline(transaction=True) as pipe:
        pipe.xadd(keys.queue(job_class), fields)  # type: ignore[arg-type]
        pipe.xdel(keys.undecodable if undecodable else keys.dead, letter.id)
        await pipe.execute()
    return job_id


@app.command("list")
def list_letters(redis_url: RedisUrl = None, pool: Pool = None, undecodable: Undecodable = False) -> None:
    """List what was given up, the oldest first."""

    async def action(redis: Redis, keys: Keys) -> int:
        table = Table("id", "job", "class", "attempts", "deaths", "age", "fields", box=None, pad_edge=False)
        for letter in await read_letters(redis, keys, undecodable):
            table.add_row(letter.id, *_cells(letter))
        Console(soft_wrap=True).print(table)
        return 0

    _run(redis_url, pool, action)


def _cells(letter: Letter) -> list[str]:
    header = letter.header
    at_ms = int(header.get("at") or letter.id.split("-")[0])
    age = f"{max(time.time() - at_ms / 1000, 0):.0f} s"
    names = " ".join(name.decode("utf-8", "replace") for name, _ in letter.fields[:8])
    deaths = str(len(_history(letter))) if header else ""
    return [header.get("job", ""), header.get("class", ""), header.get("attempt", ""), deaths, age, names]


def _history(letter: Letter) -> list[dict[str, Any]]:
    try:
        found = json.loads(letter.header.get("history", "[]"))
    except ValueError:
        return []
    return found if isinstance(found, list) else []


@app.command()
def show(
    letter_id: str, redis_url: RedisUrl = None, pool: Pool = None, undecodable: Undecodable = False
) -> None:
    """Print one as JSON: its history and its fields. Bytes that are no UTF-8 are shown as \\xNN."""

    async def action(redis: Redis, keys: Keys) -> int:
        (letter,) = await read_letters(redis, keys, undecodable, letter_id)
        fields = [[part.decode("utf-8", "backslashreplace") for part in pair] for pair in letter.fields]
        shown = {"id": letter.id, **letter.header, "history": _history(letter), "fields": fields}
        typer.echo(json.dumps(shown, ensure_ascii=False, indent=2))
        return 0

    _run(redis_url, pool, action)


@app.command("replay")
def replay_letters(
    letter_ids: Ids,
    redis_url: RedisUrl = None,
    pool: Pool = None,
    undecodable: Undecodable = False,
    job_class: Annotated[str, typer.Option("--class", help="Not set: as it was, else normal.")] = "",
) -> None:
    """Submit entries again, each under a new job id, which is printed."""

    async def action(redis: Redis, keys: Keys) -> int:
        for letter_id in letter_ids:
            (letter,) = await read_letters(redis, keys, undecodable, letter_id)
            wanted = job_class or letter.header.get("class", "normal")
            if wanted not in CLASSES:
                raise HeadraceError("invalid_request", f"--class is one of {', '.join(CLASSES)}.")
            typer.echo(await replay(redis, keys, letter, wanted, undecodable=undecodable))
        return 0

    _run(redis_url, pool, action)


@app.command()
def drop(
    letter_ids: Ids, redis_url: RedisUrl = None, pool: Pool = None, undecodable: Undecodable = False
) -> None:
    """Delete entries for good."""

    async def action(redis: Redis, keys: Keys) -> int:
        gone = await redis.xdel(keys.undecodable if undecodable else keys.dead, *letter_ids)
        typer.echo(f"dropped {gone} of {len(letter_ids)}")
        return 0 if gone == len(letter_ids) else EXIT_FAILED

    _run(redis_url, pool, action)


def _run(redis_url: str | None, pool: str | None, action: Any) -> None:
    async def connected(settings: CommonSettings) -> int:
        redis = connect(settings.redis_url)
        try:
            return int(await action(redis, Keys(settings.pool)))
        finally:
            await redis.aclose()

    run_against(redis_url, pool, connected)

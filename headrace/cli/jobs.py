"""`headrace submit`, `follow`, `poll`, `cancel`: the Python client at the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
import typer

from headrace.cli.connection import EXIT_FAILED, Pool, RedisUrl, run_against
from headrace.cli.options import tell_error
from headrace.client import Client
from headrace.config import CommonSettings, ConfigError
from headrace.messages import Delta, End, Event

JobId = Annotated[str, typer.Argument(help="Id of the job, as `submit` printed it.")]
Json = Annotated[bool, typer.Option("--json", help="Print each event as a JSON object.")]


def register(app: typer.Typer) -> None:
    for command in (submit, follow, poll, cancel):
        app.command()(command)


def submit(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    redis_url: RedisUrl = None,
    pool: Pool = None,
    chat: Annotated[bool, typer.Option(help="Send it as a user's message instead of raw text.")] = False,
    job_class: Annotated[str, typer.Option("--class", help="high, normal or low.")] = "normal",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the most likely token.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    field: Annotated[
        list[str] | None, typer.Option(help="Any other field of the protocol, NAME=JSON; repeatable.")
    ] = None,
    follow: Annotated[bool, typer.Option(help="Print the answer as it comes.")] = True,
    as_json: Json = False,
) -> None:
    """Send a prompt to the queue; print the answer as it comes, or with --no-follow the job's id."""

    async def action(settings: CommonSettings) -> int:
        text = sys.stdin.read() if prompt == "-" else prompt
        source: dict[str, Any] = (
            {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        )
        chosen = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        params = {name: value for name, value in chosen.items() if value is not None} | _fields(field or [])
        client = Client(settings.redis_url, settings.pool)
        try:
            job_id = await client.submit(job_class=job_class, **source, **params)
            if follow:
                return await _print_events(client.follow(job_id), as_json)
            typer.echo(job_id)
            return 0
        finally:
            await client.close()

    run_against(redis_url, pool, action)


def follow(
    job_id: JobId,
    redis_url: RedisUrl = None,
    pool: Pool = None,
    after_seq: Annotated[int, typer.Option(min=0, help="Go on after this event.")] = 0,
    as_json: Json = False,
) -> None:
    """Print a job's answer from its beginning, as it comes."""

    async def action(settings: CommonSettings) -> int:
        client = Client(settings.redis_url, settings.pool)
        try:
            return await _print_events(client.follow(job_id, after_seq), as_json)
        finally:
            await client.close()

    run_against(redis_url, pool, action)


def poll(job_id: JobId, redis_url: RedisUrl = None, pool: Pool = None) -> None:
    """Print a job's state as JSON."""

    async def action(settings: CommonSettings) -> int:
        client = Client(settings.redis_url, settings.pool)
        try:
            state = await client.poll(job_id)
        finally:
            await client.close()
        if state is None:
            tell_error(f"no job {job_id} in pool {settings.pool}: a wrong id, or it has expired")
            return EXIT_FAILED
        typer.echo(msgspec.json.format(msgspec.json.encode(state)).decode())
        return 0

    run_against(redis_url, pool, action)


def cancel(job_id: JobId, redis_url: RedisUrl = None, pool: Pool = None) -> None:
    """Stop a job at its next token, or before it starts."""

    async def action(settings: CommonSettings) -> int:
        client = Client(settings.redis_url, settings.pool)
        try:
            done = await client.cancel(job_id)
        finally:
            await client.close()
        typer.echo("cancelled" if done else "it has ended already, or there is no such job")
        return 0 if done else EXIT_FAILED

    run_against(redis_url, pool, action)


def _fields(pairs: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"--field {pair}: expected NAME=JSON")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value  # bare words are text
    return fields


async def _print_events(events: AsyncIterator[Event], as_json: bool) -> int:
    """Text of choice 0 (or every event) to stdout. Returns 0 for a job that is done."""
    status = EXIT_FAILED
    async for event in events:
        if as_json:
            typer.echo(msgspec.json.encode(event).decode())
        elif isinstance(event, Delta) and event.i == 0:
            typer.echo(event.text, nl=False)
            sys.stdout.flush()
        if isinstance(event, End):
            status = _end(event, as_json)
    return status


def _end(event: End, as_json: bool) -> int:
    if not as_json:
        typer.echo()
        if event.status != "done":
            error = event.error or {}
            tell_error(f"{event.status}: {error.get('code', '')} {error.get('message', '')}".strip(": "))
    return 0 if event.status == "done" else EXIT_FAILED

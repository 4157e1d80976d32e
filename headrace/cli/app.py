"""The `headrace` command and its subcommands."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from headrace.cli import chaos, dead, jobs, keys, status, verify
from headrace.cli.options import with_one_line_errors
from headrace.models import resolve_model

# Plain help: rich's columns cut long flags short.
app = typer.Typer(
    name="headrace",
    help="LLM inference behind Redis streams.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
jobs.register(app)
status.register(app)
keys.register(app)
verify.register(app)
dead.register(app)
chaos.register(app)


@app.command()
def up(
    model: Annotated[
        str | None, typer.Option(help="Folder, GGUF file or hub id; not set: the demo model.")
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="Name of the pool; not set: made from the model's.")
    ] = None,
    redis_url: Annotated[str | None, typer.Option(help="Your Redis; not set: one of our own is run.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the gateway.")] = None,
    port: Annotated[str | None, typer.Option(help="Port of the gateway; 0: any.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="How many workers.")] = 1,
) -> None:
    """Start Redis, workers and the gateway here; serve until Ctrl-C.

    All other settings are taken from HEADRACE_* variables (see `python -m worker --help`).
    """
    from headrace.cli.plan import make_plan
    from headrace.cli.screen import Screen
    from headrace.cli.up import Stack

    flags = {
        "model": model,
        "pool": pool,
        "redis_url": redis_url,
        "host": host,
        "port": port,
        "device": device,
        "log_level": log_level,
    }
    with_one_line_errors(lambda: Stack(make_plan(os.environ, flags, workers), Screen()).run())


@app.command()
def fetch(
    model: Annotated[str | None, typer.Argument(help="Hub id; not set: the demo model.")] = None,
) -> None:
    """Fetch a model and print where it is."""

    def action() -> int:
        typer.echo(resolve_model(model))
        return 0

    with_one_line_errors(action)

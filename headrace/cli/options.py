"""Command lines made from settings classes: a flag for each field, with text, default and variable."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin

import typer
from rich.console import Console

from headrace.config import CommonSettings, ConfigError, Field, fields, load_settings
from headrace.embedded import EmbeddedRedisError
from headrace.models import ModelError

S = TypeVar("S", bound=CommonSettings)
USER_ERRORS = (ConfigError, ModelError, EmbeddedRedisError)


def serve(cls: type[S], run: Callable[[S], int], *, prog: str, description: str) -> NoReturn:
    """The whole `main` of a service: reads settings from the command line and the environment, runs, exits.

    A setting, model or server that cannot be used ends it with one line and status 2.
    """
    # Until the service handles it itself: as process 1 of a container it would not even notice.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Plain help: rich's columns cut long flags and variables short.
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=description)(settings_command(cls, run))
    app(prog_name=prog)
    sys.exit(0)


def settings_command(cls: type[S], run: Callable[[S], int]) -> Callable[..., None]:
    """A function with one keyword for each setting, for typer: loads the settings, calls `run`, exits."""

    def command(**flags: Any) -> None:
        with_one_line_errors(lambda: run(load_settings(cls, os.environ, flags)))

    parameters = [_parameter(field) for field in fields(cls)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def with_one_line_errors(action: Callable[[], int]) -> NoReturn:
    try:
        status = action()
    except USER_ERRORS as problem:
        tell_error(str(problem))
        status = 2
    raise typer.Exit(status)


def tell_error(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_plain(text)}", highlight=False)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _parameter(field: Field) -> inspect.Parameter:
    # Values stay text: the one place that converts and refuses them is load_settings.
    of_switch = field.type is bool
    flag = f"{field.flag}/--no-{field.flag.removeprefix('--')}" if of_switch else field.flag
    option = typer.Option(
        flag, help=_help(field), metavar=None if of_switch else _metavar(field), show_default=False
    )
    annotation = Annotated[(bool if of_switch else str) | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _help(field: Field) -> str:
    default = f"default: {field.default}, " if field.default else ""
    return f"{field.description} [{default}env: {field.env}]"


def _metavar(field: Field) -> str:
    if get_origin(field.type) is Literal:
        return "|".join(get_args(field.type))
    return {int: "INT", float: "NUMBER"}.get(field.type, "TEXT")

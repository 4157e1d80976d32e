"""Settings from `HEADRACE_*` variables and flags, loud about what is unknown."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from headrace.config.services import SERVICES, CommonSettings
from headrace.config.values import PREFIX, ConfigError, env_name, refusal

IGNORED_PREFIX = "HEADRACE_TEST_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASS|URL")
S = TypeVar("S", bound=CommonSettings)


@dataclass(frozen=True, slots=True)
class Field:
    """One setting as the command line needs it."""

    name: str
    env: str
    flag: str
    type: Any  # without Annotated
    description: str
    default: str  # as shown in --help


def fields(cls: type[CommonSettings]) -> Iterator[Field]:
    hints = get_type_hints(cls, include_extras=True)
    for info in msgspec.structs.fields(cls):
        hint = hints[info.name]
        default = "generated" if info.name == "worker_id" else _shown(info)
        flag = "--" + info.name.replace("_", "-")
        yield Field(
            info.name, env_name(info.name), flag, hint.__origin__, hint.__metadata__[0].description, default
        )


def known_names() -> frozenset[str]:
    """Every `HEADRACE_*` variable that some service knows."""
    return frozenset(field.env for service in SERVICES for field in fields(service))


def load_settings(cls: type[S], env: Mapping[str, str], overrides: Mapping[str, Any] | None = None) -> S:
    """Settings from `env` and `overrides` (by field name; None: not given), which win.

    An empty variable counts as not set, so that compose files can pass `${X:-}`.
    Raises ConfigError for an unknown `HEADRACE_*` name, and for a value that does not fit.
    """
    refuse_unknown(env)
    hints = get_type_hints(cls, include_extras=True)
    values: dict[str, Any] = {}
    for field in fields(cls):
        value = (overrides or {}).get(field.name)
        if value is None:
            value = env.get(field.env) or None
        if value is not None:
            values[field.name] = _convert(field, value, hints[field.name])
    return cls(**values)


def refuse_unknown(env: Mapping[str, str]) -> None:
    known = known_names()
    for name in sorted(env):
        if name.startswith(PREFIX) and not name.startswith(IGNORED_PREFIX) and name not in known:
            shown = "(not shown)" if _SECRET_NAME.search(name) else repr(env[name])
            raise ConfigError(f"{name}={shown} is not a setting: {_suggestion(name, known)}")


def _suggestion(name: str, known: frozenset[str]) -> str:
    without_prefix = {other.removeprefix(PREFIX) for other in known}
    close = difflib.get_close_matches(name.removeprefix(PREFIX), without_prefix, n=1, cutoff=0.7)
    return f"did you mean {PREFIX}{close[0]}?" if close else "unset it; --help lists the known ones"


def _convert(field: Field, value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(_prepared(field, value), hint, strict=False)
    except (msgspec.ValidationError, ValueError) as problem:
        raise ConfigError(refusal(field.name, value, _expected(field, str(problem)))) from None


def _expected(field: Field, problem: str) -> str:
    if get_origin(field.type) is Literal:
        return "one of " + ", ".join(get_args(field.type))
    if problem.startswith("Expected `") and "got" in problem:
        return {int: "a whole number", float: "a number"}.get(field.type, problem)
    return problem


def _prepared(field: Field, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.strip()
    if field.type is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise ValueError("true or false")
    if field.type == tuple[str, ...]:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _shown(info: msgspec.structs.FieldInfo) -> str:
    if info.default_factory is not msgspec.NODEFAULT:
        return str(info.default_factory())
    if isinstance(info.default, bool):
        return str(info.default).lower()
    return "" if info.default in (None, ()) else str(info.default)

"""Checks of single values. Each says, when it refuses, which field is wrong and what would be right."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec

from headrace.errors import HeadraceError

_INTEGER = re.compile(rb"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(rb"[+-]?([0-9]{1,40}(\.[0-9]*)?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,4})?")
_TRUE, _FALSE = (b"true", b"1"), (b"false", b"0")
SHOWN = 40

Check = Callable[[str, Any], Any]


def refuse(field: str, right: str, value: Any = ..., code: str = "invalid_request") -> NoReturn:
    """Raises the error that names the field, what it must be and, shortened, what it was."""
    raise HeadraceError(code, f"{field} must be {right}" + _shown(value) + ".", field)


def _shown(value: Any) -> str:
    if value is ...:
        return ""
    if value is None or isinstance(value, bool | int | float):
        text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
        return f", not {text}"
    if isinstance(value, str | bytes):
        text = value if isinstance(value, str) else value.decode("utf-8", "replace")
        return f", not {text[:SHOWN]!r}" + ("…" if len(text) > SHOWN else "")
    return f", not a {type(value).__name__}"


def integer(low: int, high: int) -> Check:
    def check(field: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            refuse(field, f"an integer from {low} to {high}", value)
        return value

    return check


def number(low: float, high: float) -> Check:
    def check(field: str, value: Any) -> float:
        good = type(value) in (int, float) and low <= value <= high  # false for NaN
        if not good:
            refuse(field, f"a number from {low:g} to {high:g}", value)
        return float(value)

    return check


def boolean(field: str, value: Any) -> bool:
    if type(value) is not bool:
        refuse(field, "true or false", value)
    return value


def string(most: int) -> Check:
    def check(field: str, value: Any) -> str:
        if not isinstance(value, str) or not 1 <= len(value) <= most:
            refuse(field, f"a string of 1 to {most} characters", value)
        return valid_text(field, value)

    return check


def valid_text(field: str, value: str) -> str:
    """JSON can say half a surrogate pair; UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(field, "valid Unicode: it holds half a surrogate pair")
    return value


def strings(most: int, longest: int) -> Check:
    one = string(longest)

    def check(field: str, value: Any) -> tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or len(values) > most:
            refuse(field, f"a string or a list of at most {most} strings", value)
        return tuple(one(f"{field}[{i}]", v) for i, v in enumerate(values))

    return check


def integers(most: int, low: int, high: int) -> Check:
    one = integer(low, high)

    def check(field: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > most:
            refuse(field, f"a list of at most {most} integers", value)
        return tuple(one(f"{field}[{i}]", v) for i, v in enumerate(value))

    return check


def biases(low: float, high: float, highest_id: int) -> Check:
    one = number(low, high)

    def check(field: str, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            refuse(field, "an object of token ids and numbers", value)
        return {_token_id(field, key, highest_id): one(f"{field}.{key}", bias) for key, bias in value.items()}

    return check


def _token_id(field: str, key: Any, highest: int) -> int:
    text = str(key) if type(key) in (int, str) else ""
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) > highest:
        refuse(field, f"keyed by token ids from 0 to {highest}", key)
    return int(text)


# Flat fields: bytes to the values that JSON would have given.


def flat_integer(field: str, raw: bytes) -> int:
    if not _INTEGER.fullmatch(raw):
        refuse(field, "an integer in decimal", raw)
    return int(raw)


def flat_number(field: str, raw: bytes) -> float:
    value = float(raw) if _NUMBER.fullmatch(raw) else math.nan
    if not math.isfinite(value):
        refuse(field, "a finite number in decimal", raw)
    return value


def flat_boolean(field: str, raw: bytes) -> bool:
    if raw not in _TRUE and raw not in _FALSE:
        refuse(field, "true or false (or 1 or 0)", raw)
    return raw in _TRUE


def flat_text(field: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        refuse(field, f"valid UTF-8: byte {error.start} is not")


def flat_json(field: str, raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        refuse(field, f"valid JSON ({reason[:120]})")


def flat_strings(field: str, raw: bytes) -> Any:
    """A JSON list, or else one string as it is."""
    return flat_json(field, raw) if raw.startswith(b"[") else flat_text(field, raw)

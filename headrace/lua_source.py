"""Composes the Lua scripts from lua/*.lua and the libraries their first line names."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import msgspec

from headrace.errors import ERRORS, HeadraceError

_USES = "-- uses:"


@dataclass(frozen=True, slots=True)
class LuaSource:
    text: str
    sha: str


def _read(name: str) -> str:
    return files("headrace").joinpath("lua", name).read_text(encoding="utf-8")


def _lua_string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


def _error_table() -> str:
    """The `error` object of each code as JSON, so that Lua and Python cannot differ."""
    wires = {code: msgspec.json.encode(HeadraceError(code).to_wire()).decode() for code in ERRORS}
    rows = ", ".join(f"{code} = {_lua_string(wire)}" for code, wire in wires.items())
    return f"local ERRORS = {{{rows}}}\n"


@cache
def load_script(name: str) -> LuaSource:
    """The whole text of lua/<name>.lua with its libraries before it, and its SHA-1 as EVALSHA wants it."""
    body = _read(f"{name}.lua")
    first = body.split("\n", 1)[0]
    libraries = first.removeprefix(_USES).split() if first.startswith(_USES) else []
    parts = [_read(f"lib/{library}.lua") for library in libraries]
    if "ending" in libraries:
        parts.insert(0, _error_table())
    text = "\n".join([*parts, body])
    return LuaSource(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

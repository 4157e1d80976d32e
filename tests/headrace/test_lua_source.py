"""Rules every script keeps: keys come from KEYS, errors from the one table, nothing is decoded or random."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files

import msgspec
import pytest

from headrace.errors import ERRORS, HeadraceError
from headrace.lua_source import load_script

SCRIPTS = (
    "submit", "pick", "claim", "emit", "renew", "release", "cancel", "reap", "pardon", "admit",
    "key_create", "key_revoke", "fork",
)  # fmt: skip
CALL = re.compile(r"redis\.p?call\(\s*'([A-Z]+)'\s*(?:,\s*([^)]*))?", re.DOTALL)
# k, j: tables whose fields are assigned from KEYS alone; the names are parameters given such fields.
KEY = re.compile(r"(k|j)\.(\w+)(\[[\w.]+\])?|KEYS\[[^\]]+\]|queue|key|vtime_key")
KEY_AT = {"XREADGROUP": "STREAMS", "XGROUP": 1, "XINFO": 1, "MEMORY": 1}
KEY_FIELDS = {
    "queue", "ready", "vtime", "leases", "deadlines", "ids", "dead", "ctl", "workers", "undecodable",
    "hooks", "usage", "suspects", "rate", "keys", "key", "job", "log", "live", "idem",
    "high", "normal", "low",
}  # fmt: skip


def sources() -> dict[str, str]:
    root = files("headrace").joinpath("lua")
    found = {f"{name}.lua": root.joinpath(f"{name}.lua").read_text() for name in SCRIPTS}
    for library in ("base", "cost", "suspects", "forecast", "ending"):
        found[f"lib/{library}.lua"] = root.joinpath("lib", f"{library}.lua").read_text()
    return found


def key_of(command: str, arguments: str) -> str:
    parts = [part.strip() for part in arguments.split(",")]
    at = KEY_AT.get(command, 0)
    if at == "STREAMS":
        return parts[parts.index("'STREAMS'") + 1]
    return parts[int(at)]


@pytest.mark.parametrize("name", list(sources()))
def test_every_key_derives_from_keys(name: str) -> None:
    calls = CALL.findall(sources()[name])
    assert calls or name == "lib/base.lua"
    for command, arguments in calls:
        if command == "TIME":
            continue
        key = key_of(command, arguments)
        match = KEY.fullmatch(key)
        assert match, f"{command} {key}"
        assert match[2] is None or match[2] in KEY_FIELDS, f"{command} {key}"


@pytest.mark.parametrize("name", list(sources()))
def test_key_tables_are_filled_from_keys_alone(name: str) -> None:
    text = sources()[name]
    for field, value in re.findall(r"\b(\w+) = (KEYS\[[^\]]+\]|set_of\(KEYS, \d+\))", text):
        assert field in KEY_FIELDS, (field, value)
    assigned = re.findall(r"\b[kj]\.(\w+)\s*(?:,\s*[kj]\.\w+\s*)*=[^=]", text)
    for field in set(assigned) & KEY_FIELDS:
        values = re.findall(rf"\b[kj]\.{field} = (.+)", text)
        assert all("KEYS[" in value for value in values), (field, values)


@pytest.mark.parametrize("name", list(sources()))
def test_nothing_is_decoded_random_or_global(name: str) -> None:
    text = sources()[name]
    for forbidden in ("cjson.decode", "cmsgpack.unpack", "math.random", "loadstring", "os."):
        assert forbidden not in text
    for line in text.splitlines():
        assert not re.match(r"(\w+)\s*=[^=]", line) or "local" in line or line.startswith(" "), line


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_sha_is_that_of_the_text(name: str) -> None:
    script = load_script(name)
    assert script.sha == hashlib.sha1(script.text.encode()).hexdigest()
    assert script is load_script(name)


def test_errors_in_lua_are_those_of_python() -> None:
    text = load_script("claim").text
    for code in ERRORS:
        wire = msgspec.json.encode(HeadraceError(code).to_wire()).decode()
        assert f"{code} = '" + wire.replace("'", "\\'") + "'" in text

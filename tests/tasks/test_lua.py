"""The gateway's scripts keep the rules of the protocol's: keys are KEYS, nothing is decoded or random."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

ROOT = files("headrace").joinpath("lua", "gateway")
NAMES = sorted(path.name for path in ROOT.iterdir())
CALL = re.compile(r"redis\.p?call\(\s*'([A-Z]+)'\s*(?:,\s*([^,)]*))?")


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_declared(name: str) -> None:
    text = ROOT.joinpath(name).read_text()
    declared = set(re.findall(r"(\w+) = KEYS\[\d+\]", text))
    for command, key in CALL.findall(text):
        if command != "TIME":
            assert key.strip().removeprefix("k.") in declared, f"{command} {key}"
    assert text.count("KEYS[") == len(re.findall(r"\w+ = KEYS\[\d+\]", text))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_decoded_or_random(name: str) -> None:
    text = ROOT.joinpath(name).read_text()
    for forbidden in ("cjson.decode", "cmsgpack.unpack", "math.random", "loadstring"):
        assert forbidden not in text

"""docs/PROTOCOL.md names every field, range, code, key and script there is."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from headrace.client import JobState
from headrace.errors import ERRORS
from headrace.keys import Keys
from headrace.messages import Job, SamplingParams
from headrace.params import RULES

TEXT = (Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text(encoding="utf-8")


def row_of(name: str) -> str:
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and f"`{name}`" in line.split("|")[1]]
    assert rows, f"no row for {name}"
    return rows[0]


@pytest.mark.parametrize("name", [*RULES, "id", "tenant", "ttl_ms", "meta", "webhook", "v", "model"])
def test_every_field_of_a_submission(name: str) -> None:
    assert row_of(name).count("|") == 4


def test_every_parameter_has_a_rule_and_every_job_field_a_row() -> None:
    assert set(RULES) == set(SamplingParams.__struct_fields__)
    internal = {"pool", "job_class", "entry_id", "params"}
    for name in set(Job.__struct_fields__) - internal:
        assert f"`{name}`" in TEXT, name


@pytest.mark.parametrize("code", list(ERRORS))
def test_every_error_code(code: str) -> None:
    spec = ERRORS[code]
    cells = [cell.strip() for cell in row_of(code).split("|")]
    assert cells[2:4] == ["yes" if spec.retryable else "no", str(spec.http_status)]


@pytest.mark.parametrize("name", sorted(set(JobState.__struct_fields__) - {"id"}))
def test_every_field_of_a_state(name: str) -> None:
    assert row_of(name)


def test_every_key() -> None:
    keys = Keys("P")
    named = [
        keys.vtime,
        keys.ids,
        keys.leases,
        keys.suspects,
        keys.deadlines,
        keys.ctl,
        keys.dead,
        keys.undecodable,
        keys.workers,
        keys.hooks,
        keys.usage("<YYYY-MM>"),
    ]
    named += [keys.queue("<class>"), keys.ready("<class>"), keys.job("<id>"), keys.log("<id>")]
    named += [keys.live("<id>"), keys.worker("<worker>"), keys.idem("<tenant>", "<key>")]
    for key in named:
        assert f"`{key.replace('{P}', '{<pool>}')}`" in TEXT, key


def test_every_script() -> None:
    for script in files("headrace").joinpath("lua").iterdir():
        if script.name.endswith(".lua"):
            assert row_of(script.name.removesuffix(".lua"))

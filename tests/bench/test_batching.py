"""What is shown and written of runs; the runs themselves are made up here."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("matplotlib")

from benchmarks import batching
from benchmarks.batching import MODES, Plan, Run, compare
from benchmarks.figures import Utilisation, summarise
from benchmarks.load import JobTimes
from benchmarks.machine import CpuUse
from benchmarks.workload import forced

PNG = b"\x89PNG"


def made_up(mode: str, number: int, *, others: float = 0.0) -> Run:
    pace = (1 + list(MODES).index(mode)) * (1 + number) * 0.01
    jobs = [JobTimes("a", 0.0, [pace * i for i in range(1, 9)], 8 * pace)]
    return Run(mode, number, summarise(jobs), Utilisation(8, 0.75, None), CpuUse(1.5, others), jobs)


def printed(plan: Plan, monkeypatch: pytest.MonkeyPatch, others: float = 0.0) -> str:
    async def measure(plan: Plan, mode: str, number: int) -> Run:
        return made_up(mode, number, others=others)

    monkeypatch.setattr(batching, "_measure", measure)
    output = io.StringIO()
    compare(plan, Console(file=output, width=160))
    return output.getvalue()


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(
        "workload", [forced({"prompt": "x"}, 8)], 3, list(MODES), {"threads": 1}, tmp_path / "results"
    )


def test_the_table_shows_medians_over_rounds(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(plan, monkeypatch)
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if "│" in line}
    assert set(MODES) <= set(rows)
    assert "50.0" in rows["continuous"]  # 8 tokens in 8 × 20 ms, the middle one of three rounds
    assert "75%" in rows["static"]
    assert "–" in rows["static"]
    assert "don't trust" not in text


def test_picture_and_raw_figures_are_written(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    printed(replace(plan, rounds=1), monkeypatch)
    [picture], [raw] = (list(plan.results.glob(f"*.{kind}")) for kind in ("png", "json"))
    assert picture.read_bytes()[:4] == PNG
    content = json.loads(raw.read_text())
    assert [run["mode"] for run in content["runs"]] == list(MODES)
    assert len(content["runs"][0]["jobs"][0]["token_s"]) == 8


def test_a_busy_machine_is_told(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "don't trust" in printed(replace(plan, rounds=1), monkeypatch, others=0.7)

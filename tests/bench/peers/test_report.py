from pathlib import Path

import pytest

from benchmarks.figures import summarise
from benchmarks.load import JobTimes
from benchmarks.machine import CpuUse
from benchmarks.peers.measure import Run
from benchmarks.peers.probe import Speed
from benchmarks.peers.report import Findings, draw, grids
from benchmarks.peers.work import Mode

OFFLINE, SINGLE, ONLINE = Mode("offline"), Mode("single"), Mode("online", 2.0)


def run(candidate: str, mode: Mode, gap_s: float, *, others: float = 0.0) -> Run:
    times = [0.5 + gap_s * n for n in range(11)]
    summary = summarise([JobTimes("job", 0.0, times, times[-1])])
    decode = 1 / gap_s if mode.name == "single" else None
    cpu, quiet = CpuUse(2.0, others), others <= 0.1
    return Run(
        candidate,
        mode,
        0,
        summary,
        decode,
        cpu,
        Speed(100.0, 20.0),
        1.0,
        {"worker": 200, "redis": 100},
        quiet,
    )


RUNS = [
    *(run("ours", mode, 0.01) for mode in (OFFLINE, SINGLE, ONLINE)),
    *(run("good", mode, 0.02) for mode in (OFFLINE, SINGLE, ONLINE)),
    *(run("poor", mode, 0.04) for mode in (OFFLINE, SINGLE)),
]


def test_ratios_are_to_the_best_peer() -> None:
    at_once, online = grids(Findings(RUNS, {"ours"}))
    speeds = {row[0]: row[at_once.headings.index("single, tok/s")] for row in at_once.rows}
    assert speeds == {"ours": "100 (2.00)", "good": "50.0 (1.00)", "poor": "25.0 (0.50)"}
    gaps = {row[0]: row[online.headings.index("ITL p50, ms")] for row in online.rows}
    peaks = {row[0]: row[at_once.headings.index("peak MiB")] for row in at_once.rows}
    assert set(peaks.values()) == {"300"}
    assert gaps == {"ours": "10.0 (0.50)", "good": "20.0 (1.00)"}
    assert "| ours |" in online.markdown()


def test_runs_beside_other_work_do_not_count() -> None:
    noisy = [*RUNS, run("good", SINGLE, 0.001, others=0.5)]
    assert Findings(noisy, {"ours"}).speed("good", SINGLE) == 50.0
    alone = Findings([run("ours", SINGLE, 0.01, others=0.5)], {"ours"})
    assert alone.speed("ours", SINGLE) is None
    assert grids(alone)[0].rows[0][1] == "–"


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn by make bench alone")
    draw(tmp_path / "picture.png", Findings(RUNS, {"ours"}))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")

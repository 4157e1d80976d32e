"""A driver as a real process, which answers as the peers' do."""

import asyncio
import os
from pathlib import Path

import pytest

from benchmarks.load import LoadError
from benchmarks.peers.processes import peaks_mib, tree
from benchmarks.peers.sessions import DRIVERS, driver, headrace
from benchmarks.peers.work import PeerRequest, summary_of

COUNTING = """
import sys
sys.path.insert(0, sys.argv[1])
from channel import Answer, Clock, serve

def run(requests):
    clock = Clock()
    answers = [Answer(request.id, request.arrive_s) for request in requests]
    for request, answer in zip(requests, answers):
        clock.wait_until(request.arrive_s)
        answer.take(request.output_tokens, clock.now_s())
    return answers

print("what a library prints does no harm")
serve(int(sys.argv[2]), run, {"kv_tokens": 512})
"""


def script(folder: Path, text: str) -> str:
    path = folder / "drive.py"
    path.write_text(text)
    return str(path)


async def test_requests_go_out_and_answers_come_back(tmp_path: Path) -> None:
    start = driver("python3", script(tmp_path, COUNTING), [str(DRIVERS)], [], {})
    async with start(tmp_path / "log") as session:
        assert session.settings == {"kv_tokens": 512}
        for _ in range(2):
            first, second = await session.run([PeerRequest(1, [5], 3), PeerRequest(2, [5], 4, 0.1)])
            assert (first.id, first.tokens, len(first.token_s)) == (1, 3, 3)
            assert (second.id, second.tokens) == (2, 4)
            assert second.token_s[0] >= 0.1


LEAVING = COUNTING.replace("print(", "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, ")


async def test_no_process_of_a_driver_outlives_it(tmp_path: Path) -> None:
    start = driver("python3", script(tmp_path, LEAVING), [str(DRIVERS)], [], {})
    async with start(tmp_path / "log") as session:
        started = set(session.roots.values())
        [left] = tree(started) - started
    with pytest.raises(ProcessLookupError):
        await until_gone(left)


async def until_gone(pid: int) -> None:
    while True:
        os.kill(pid, 0)
        await asyncio.sleep(0.01)


async def test_a_driver_that_dies_is_told(tmp_path: Path) -> None:
    start = driver("python3", script(tmp_path, "raise SystemExit('no model')"), ["x"], [], {})
    with pytest.raises(LoadError, match="ended"):
        async with start(tmp_path / "log"):
            pass
    assert "no model" in (tmp_path / "log").read_text()


async def test_a_driver_that_does_not_get_ready_is_told(tmp_path: Path) -> None:
    start = driver("python3", script(tmp_path, "import signal; signal.pause()"), [], [], {}, 0.1)
    with pytest.raises(LoadError, match=r"0\.1 s"):
        async with start(tmp_path / "log"):
            pass


@pytest.mark.e2e
async def test_headrace_is_measured_through_its_gateway(tmp_path: Path) -> None:
    requests = [PeerRequest(1, [104, 105], 20), PeerRequest(2, [104], 30, 0.1)]
    settings = {"model": "simulated:step_ms=1"}
    async with headrace(settings)(tmp_path / "log") as session:
        answers = await session.run(requests)
        assert session.settings == settings
        peaks = peaks_mib(session.roots)
        assert set(peaks) == {"worker", "gateway", "redis"}
        assert all(10 < mib < 1_000 for mib in peaks.values())
    summary = summary_of(requests, answers)
    assert summary.output_tokens == 50
    assert answers[1].submitted_s >= 0.1

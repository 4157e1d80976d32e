"""A real worker process without weights, measured for real: the figures are those of its step time."""

import asyncio
import signal
from pathlib import Path

import pytest

from benchmarks import latency
from benchmarks.load import LoadDriver
from benchmarks.serving import ServingError, own_redis, serving
from benchmarks.workload import forced

pytestmark = [pytest.mark.redis, pytest.mark.e2e]
STEP_MS = 20
SETTINGS: dict[str, str | int] = {"model": f"simulated:step_ms={STEP_MS}", "log_format": "json"}


async def test_a_worker_is_measured_and_its_card_read(tmp_path: Path) -> None:
    with own_redis() as server:
        async with (
            serving(server, "bench", SETTINGS, tmp_path / "log") as worker,
            LoadDriver(server.url, "bench") as driver,
        ):
            before = await worker.settled_card()
            [job] = await worker.during(driver.run([forced({"prompt": "hello"}, 10)], timeout_s=30))
            after = await worker.settled_card()
    assert len(job.token_s) == 10
    assert job.ended_s - job.submitted_s >= 9 * STEP_MS / 1e3
    assert after["slot_steps_used"] - before["slot_steps_used"] == 10


async def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    with own_redis() as server, pytest.raises(ServingError, match="no-such-model"):
        async with serving(server, "bench", {"model": "./no-such-model"}, tmp_path / "log"):
            pytest.fail("it started")


async def test_a_worker_that_dies_ends_the_measurement(tmp_path: Path) -> None:
    with own_redis() as server:
        async with serving(server, "bench", SETTINGS, tmp_path / "log") as worker:
            worker.process.send_signal(signal.SIGKILL)
            with pytest.raises(ServingError, match="has ended"):
                await worker.during(asyncio.Event().wait())


async def test_latency_of_a_known_worker(tmp_path: Path) -> None:
    figures = await latency._measure(tmp_path, SETTINGS, 5, 1.0)
    assert figures.step_ms == pytest.approx(STEP_MS, rel=0.5)
    assert all(1 <= steps <= 5 for steps in figures.joining_steps)
    assert len(figures.joining_steps) >= 3

"""The worker's series: all there at zero, moved by what Redis acknowledged, free of what a producer wrote."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.config import ConfigError
from headrace.messages import Delta, End, Finish, Usage
from headrace.script_types import EmitItem, EmitOutcome, Final, HeldJob
from worker.metrics import Live, WorkerMetrics

INFO = {"pool": "p", "worker": "w", "model": "m", "fingerprint": "f"}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> WorkerMetrics:
    return WorkerMetrics(lambda: Live(queued=3, held=2), INFO, clock)


@pytest.fixture
def served(metrics: WorkerMetrics, free_port: Any) -> Iterator[str]:
    port = free_port()
    stop = metrics.serve("127.0.0.1", port)
    yield f"http://127.0.0.1:{port}/metrics"
    stop()


@pytest.fixture
def free_port(request: pytest.FixtureRequest) -> Any:
    return sys.modules[type(request.getfixturevalue("redis_server")).__module__].free_port


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"headrace_worker_{name}", labels)


def admitted(job_id: str = "j", waited_s: float = 2.0, said: int = 0) -> Any:
    choices = [SimpleNamespace(ids=[1] * said)]
    return SimpleNamespace(
        held=HeldJob("high", "1-0", job_id, 1),
        running=SimpleNamespace(choices=choices, prompt_ids=[1] * 5),
        request=SimpleNamespace(arrival_s=100.0 - waited_s),
        claimed_at_s=100.0,
    )


def emitted(*events: Any, final: Final | None = None, kind: Any = "ok") -> Any:
    item = EmitItem("j", "high", "1-0", 1, list(events), final)
    return [item], [EmitOutcome("j", kind, 1, kind == "ok" and final is not None)]


def delta(seq: int) -> Delta:
    return Delta(seq=seq, text="x", ids=[7])


def ended(status: Any, seq: int, **error: Any) -> tuple[End, Final]:
    usage = Usage(prompt_tokens=5, completion_tokens=3, total_tokens=8)
    return End(seq=seq, status=status, usage=usage), Final(status, usage, None, error or None)


def test_every_series_is_there_before_anything_happens(metrics: WorkerMetrics) -> None:
    for job_class in ("high", "normal", "low"):
        for name in ("ttft_seconds", "itl_seconds", "e2e_seconds", "queue_wait_seconds"):
            assert value(metrics, f"{name}_count", **{"class": job_class}) == 0
        for status in ("done", "failed", "cancelled"):
            assert value(metrics, "jobs_ended_total", **{"class": job_class, "status": status}) == 0
    for name in ("steps_total", "preemptions_total", "leases_lost_total", "leases_expired_total"):
        assert value(metrics, name) == 0
    for name in ("running", "num_blocks", "kv_utilisation", "max_num_seqs", "slot_steps_total"):
        assert value(metrics, name) == 0
    assert value(metrics, "job_errors_total", code="poison") == 0
    assert value(metrics, "queue_waiting") == 3
    assert value(metrics, "leases_held") == 2
    assert value(metrics, "info", **INFO) == 1


def test_latencies_are_those_a_reader_sees(metrics: WorkerMetrics, clock: Clock) -> None:
    metrics.took(admitted())
    clock.now_s = 100.5
    metrics.settled(*emitted(delta(1)))
    clock.now_s = 100.9
    metrics.settled(*emitted(delta(2), delta(3)))  # two steps in one call
    clock.now_s = 101.0
    end, final = ended("done", 5)
    metrics.settled(*emitted(Finish(seq=4, reason="length"), end, final=final))
    label = {"class": "high"}
    assert value(metrics, "queue_wait_seconds_sum", **label) == pytest.approx(2.0)
    assert value(metrics, "ttft_seconds_sum", **label) == pytest.approx(2.5)
    assert value(metrics, "itl_seconds_count", **label) == 2
    assert value(metrics, "itl_seconds_sum", **label) == pytest.approx(0.4)
    assert value(metrics, "e2e_seconds_sum", **label) == pytest.approx(3.0)
    assert value(metrics, "jobs_ended_total", **label, status="done") == 1


def test_what_redis_refused_counts_for_nothing(metrics: WorkerMetrics) -> None:
    metrics.took(admitted())
    end, final = ended("done", 2)
    metrics.settled(*emitted(delta(1), end, final=final, kind="stale"))
    assert value(metrics, "ttft_seconds_count", **{"class": "high"}) == 0
    assert value(metrics, "jobs_ended_total", **{"class": "high", "status": "done"}) == 0


def test_waste_and_errors(metrics: WorkerMetrics) -> None:
    metrics.took(admitted(said=4))
    end, final = ended("failed", 1, code="poison")
    metrics.settled(*emitted(end, final=final))
    assert value(metrics, "recomputed_tokens_total") == 5 + 4
    assert value(metrics, "jobs_resumed_total") == 1
    assert value(metrics, "wasted_tokens_total", status="failed") == 3
    assert value(metrics, "job_errors_total", code="poison") == 1


def test_a_job_that_left_is_forgotten(metrics: WorkerMetrics) -> None:
    metrics.took(admitted())
    metrics.keep(lambda job_id: False)
    metrics.settled(*emitted(delta(1)))
    assert value(metrics, "ttft_seconds_count", **{"class": "high"}) == 0


def test_it_is_served_and_a_taken_port_is_one_line(metrics: WorkerMetrics, served: str) -> None:
    with urllib.request.urlopen(served, timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert {"headrace_worker_queue_waiting", "headrace_worker_ttft_seconds"} <= {f.name for f in families}
    port = int(served.split(":")[2].split("/")[0])
    with pytest.raises(ConfigError, match=f"HEADRACE_METRICS_PORT={port}"):
        metrics.serve("127.0.0.1", port)


@pytest.mark.redis
@pytest.mark.e2e
def test_a_real_worker_tells_its_numbers_and_no_text(pool: Any, free_port: Any, request: Any) -> None:
    tools = sys.modules[type(pool).__module__]
    port = free_port()
    pool.start("--metrics-port", str(port))
    job = pool.submit(prompt="hushhush", max_tokens=20, temperature=0, tenant="secretive")
    pool.wait_end(job)

    def scraped() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    done = 'headrace_worker_jobs_ended_total{class="normal",status="done"} 1.0'
    tools.eventually(lambda: done in scraped())
    text = scraped()
    assert "headrace_worker_generated_tokens_total 20.0" in text
    assert 'headrace_worker_itl_seconds_count{class="normal"} 19.0' in text
    assert "hushhush" not in text
    assert "secretive" not in text

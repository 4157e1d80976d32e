"""The worker's Prometheus series, all present and at zero from the start. No label comes from a producer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.config import ConfigError
from headrace.errors import ERRORS
from headrace.messages import CLASSES, ENDED, Delta
from headrace.script_types import EmitItem, EmitOutcome
from worker.engine.stats import EngineStats
from worker.queue.intake import Admitted

PREFIX = "headrace_worker_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_COUNTERS = {
    "computed_tokens": "Tokens put through the model: prompts, outputs, and both again after a preemption.",
    "generated_tokens": "Tokens drawn.",
    "guessed_tokens": "Guesses computed behind the last tokens of sequences.",
    "right_guesses": "Guesses that came true: each a token without a step of its own.",
    "preemptions": "Sequences whose blocks were taken back.",
    "finished_choices": "Choices that came to their end.",
    "failed_requests": "Requests that the engine itself ended with an error.",
    "aborted_requests": "Requests ended from outside: cancelled, or another worker's by now.",
    "dropped_results": "Results of sequences that had left while they were computed.",
    "prefix_queried_tokens": "Prompt tokens looked up in the prefix cache.",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache.",
    "slot_steps_used": "Sequences computed, summed over steps.",
    "slot_steps": "Slots there were, summed over steps.",
    "kv_block_steps_used": "KV blocks in use, summed over steps.",
    "kv_block_steps": "KV blocks there were, summed over steps.",
}
_GAUGES = {
    "running": "Sequences in the running batch.",
    "waiting": "Sequences that the engine holds and does not run.",
    "slots_used": "Batch slots taken.",
    "max_num_seqs": "Batch slots there are.",
    "num_blocks": "KV blocks there are.",
    "free_blocks": "KV blocks that can be had, cached ones included.",
    "cached_blocks": "KV blocks that hold a findable prefix.",
    "kv_utilisation": "Share of KV blocks in use while the last step ran.",
    "token_budget": "Tokens that the next step may compute.",
    "last_step_tokens": "Tokens of the last step.",
    "last_step_seqs": "Sequences of the last step.",
}


@dataclass(frozen=True, slots=True)
class Live:
    """What is read at the moment of a scrape, from objects that other threads own. Plain numbers only."""

    stats: EngineStats | None = None
    sums: Mapping[str, int] | None = None  # of queue.card.Utilisation
    queued: int = 0
    held: int = 0
    backlog_events: int = 0
    lease_valid: bool = True


class _LiveCollector(Collector):
    def __init__(self, read: Callable[[], Live]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        live = self._read()
        yield _gauge("queue_waiting", "Jobs of the pool that no worker holds, at the last look.", live.queued)
        yield _gauge("leases_held", "Jobs under this worker's lease.", live.held)
        yield _gauge("leases_valid", "1 while the held leases are surely this worker's.", live.lease_valid)
        yield _gauge("backlog_events", "Events that Redis has not acknowledged.", live.backlog_events)
        step = live.stats.step if live.stats else 0
        yield CounterMetricFamily(PREFIX + "steps", "Steps of the engine.", value=max(step, 0))
        for name, text in _GAUGES.items():
            yield _gauge(name, text, getattr(live.stats, name, 0))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=_total(live, name))


def _total(live: Live, name: str) -> int:
    """Prometheus adds `_total` by itself, so the sums of the card that end in it are named without."""
    sums = live.sums or {}
    return sums.get(name, sums.get(f"{name}_total", 0)) or getattr(live.stats, name, 0)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=float(value))


@dataclass(slots=True)
class _Times:
    job_class: str
    submitted_s: float
    last_tokens_s: float | None = None


class WorkerMetrics:
    """Fed on the event loop, scraped on a thread of its own.

    Latencies are those a reader of the log sees: from submission, on Redis's clock, to the moment Redis has
    acknowledged the event.
    """

    def __init__(
        self,
        read: Callable[[], Live],
        info: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._times: dict[str, _Times] = {}
        common: Any = {"registry": self.registry}
        timed: Any = {"labelnames": ["class"], "buckets": _SECONDS, **common}
        by_token: Any = {**timed, "buckets": _ITL_SECONDS}
        self._claimed = Counter(PREFIX + "jobs_claimed", "Claims, takeovers too.", ["class"], **common)
        self._resumed = Counter(PREFIX + "jobs_resumed", "Claims of jobs that had tokens already.", **common)
        self._recomputed = Counter(
            PREFIX + "recomputed_tokens", "Tokens of resumed jobs that had been computed before.", **common
        )
        self._ended = Counter(PREFIX + "jobs_ended", "Jobs ended here.", ["class", "status"], **common)
        self._errors = Counter(PREFIX + "job_errors", "Failed jobs by error code.", ["code"], **common)
        self._wasted = Counter(
            PREFIX + "wasted_tokens", "Output of jobs that did not end well.", ["status"], **common
        )
        self._wait = Histogram(PREFIX + "queue_wait_seconds", "From submission to claim.", **timed)
        self._ttft = Histogram(PREFIX + "ttft_seconds", "From submission to first token.", **timed)
        self._itl = Histogram(PREFIX + "itl_seconds", "Between tokens of a choice.", **by_token)
        self._e2e = Histogram(PREFIX + "e2e_seconds", "From submission to terminal event.", **timed)
        self._lost = Counter(PREFIX + "leases_lost", "Jobs found to be another worker's.", **common)
        self._expired = Counter(PREFIX + "leases_expired", "Times all leases ran out unrenewed.", **common)
        Gauge(PREFIX + "info", "This worker.", list(info), **common).labels(**info).set(1)
        self._start_at_zero()
        self._itl_of = {job_class: self._itl.labels(job_class) for job_class in CLASSES}  # asked every token
        self.registry.register(_LiveCollector(read))

    def _start_at_zero(self) -> None:
        for job_class in CLASSES:
            self._claimed.labels(job_class)
            for histogram in (self._wait, self._ttft, self._itl, self._e2e):
                histogram.labels(job_class)
            for status in ENDED:
                self._ended.labels(job_class, status)
        for status in ("failed", "cancelled"):
            self._wasted.labels(status)
        for code in ERRORS:
            self._errors.labels(code)

    def took(self, admitted: Admitted) -> None:
        """A claim. Of a job taken over, prompt and output so far are computed again."""
        job_class, job = admitted.held.job_class, admitted.running
        submitted_s = admitted.claimed_at_s if admitted.request is None else admitted.request.arrival_s
        self._times[admitted.held.job_id] = _Times(job_class, submitted_s)
        self._claimed.labels(job_class).inc()
        self._wait.labels(job_class).observe(max(admitted.claimed_at_s - submitted_s, 0.0))
        said = sum(len(choice.ids) for choice in job.choices)
        if said:
            self._resumed.inc()
            self._recomputed.inc(len(job.prompt_ids) + said)

    def settled(self, items: Sequence[EmitItem], outcomes: Sequence[EmitOutcome]) -> None:
        """What Redis has acknowledged just now."""
        now_s = self._clock()
        for item, outcome in zip(items, outcomes, strict=True):
            times = self._times.get(item.job_id)
            if times is None or outcome.kind not in ("ok", "cancel"):
                continue
            self._note_tokens(item, times, now_s)
            if outcome.ended:
                self._note_end(item, times, now_s)

    def leases_lost(self, count: int) -> None:
        self._lost.inc(count)

    def leases_expired(self) -> None:
        self._expired.inc()

    def keep(self, still_held: Callable[[str], bool]) -> None:
        """Forgets jobs that left without an end of ours."""
        for job_id in [job_id for job_id in self._times if not still_held(job_id)]:
            del self._times[job_id]

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Answers /metrics. Returns what stops it. Raises ConfigError when the address cannot be had."""
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as problem:
            text = f"HEADRACE_METRICS_PORT={port}: cannot listen on {host}: {problem.strerror or problem}"
            raise ConfigError(text) from None

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join(1.0)

        return stop

    def _note_tokens(self, item: EmitItem, times: _Times, now_s: float) -> None:
        by_choice: dict[int, int] = {}
        for event in item.events:
            if isinstance(event, Delta) and event.ids:
                by_choice[event.i] = by_choice.get(event.i, 0) + len(event.ids)
        if not by_choice:
            return
        if times.last_tokens_s is not None:
            itl = self._itl_of[times.job_class]
            for num_tokens in by_choice.values():
                gap_s = (now_s - times.last_tokens_s) / num_tokens
                for _ in range(num_tokens):
                    itl.observe(gap_s)
        elif item.events[0].seq == 1:
            self._ttft.labels(times.job_class).observe(now_s - times.submitted_s)
        times.last_tokens_s = now_s

    def _note_end(self, item: EmitItem, times: _Times, now_s: float) -> None:
        del self._times[item.job_id]
        if item.final is None:
            return
        status, usage = item.final.status, item.final.usage
        self._ended.labels(times.job_class, status).inc()
        self._e2e.labels(times.job_class).observe(now_s - times.submitted_s)
        if status == "failed":
            code = str((item.final.error or {}).get("code"))
            self._errors.labels(code if code in ERRORS else "internal").inc()
        if status != "done" and usage is not None:
            self._wasted.labels(status).inc(usage.completion_tokens)

"""A job's spans: `job` from submission to acknowledged end, and in it `queue`, `prefill` and `decode`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.messages import Delta
from headrace.script_types import EmitItem, EmitOutcome
from headrace.tracing import Span, Tracing
from worker.queue.intake import Admitted


@dataclass(slots=True)
class _Job:
    span: Span
    claimed_s: float
    first_s: float | None = None


class JobTraces:
    """Fed like the metrics, on the event loop. A job taken over has a `job` span from each of its workers."""

    def __init__(
        self, tracing: Tracing, worker_id: str, model: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tracing = tracing
        self._common = {"headrace.worker": worker_id, "gen_ai.request.model": model}
        self._clock = clock
        self._jobs: dict[str, _Job] = {}

    def took(self, admitted: Admitted) -> None:
        claimed_s, job = admitted.claimed_at_s, admitted.running.job
        submitted_s = claimed_s if admitted.request is None else admitted.request.arrival_s
        attributes = {"headrace.job": job.id, "headrace.class": job.job_class, "headrace.pool": job.pool}
        attributes |= {"headrace.epoch": str(admitted.held.epoch), **self._common}
        resumed = any(choice.ids for choice in admitted.running.choices)
        start_s = claimed_s if resumed else submitted_s
        span = self._tracing.open("headrace.job", job.traceparent, start_s, attributes)
        if not resumed:
            self._tracing.add("headrace.queue", span.traceparent, submitted_s, claimed_s, {})
        self._jobs[job.id] = _Job(span, claimed_s)

    def settled(self, items: Sequence[EmitItem], outcomes: Sequence[EmitOutcome]) -> None:
        now_s = self._clock()
        for item, outcome in zip(items, outcomes, strict=True):
            job = self._jobs.get(item.job_id)
            if job is None or outcome.kind not in ("ok", "cancel"):
                continue
            if job.first_s is None and any(isinstance(e, Delta) and e.ids for e in item.events):
                job.first_s = now_s
                prompt = {"gen_ai.usage.input_tokens": item.prompt_tokens}
                self._tracing.add("headrace.prefill", job.span.traceparent, job.claimed_s, now_s, prompt)
            if outcome.ended:
                self._end(item, self._jobs.pop(item.job_id), now_s)

    def keep(self, still_held: Callable[[str], bool]) -> None:
        """Ends the spans of jobs that another worker has by now."""
        for job_id in [job_id for job_id in self._jobs if not still_held(job_id)]:
            self._jobs.pop(job_id).span.end(failed="lease_lost")

    def close(self) -> None:
        for job in self._jobs.values():
            job.span.end(failed="handed_over")
        self._jobs.clear()
        self._tracing.close()

    def _end(self, item: EmitItem, job: _Job, now_s: float) -> None:
        final = item.final
        if final is None:
            return
        tokens = final.usage.completion_tokens if final.usage else 0
        if job.first_s is not None:
            output = {"gen_ai.usage.output_tokens": tokens}
            self._tracing.add("headrace.decode", job.span.traceparent, job.first_s, now_s, output)
        job.span.set(
            {
                "headrace.status": final.status,
                "gen_ai.usage.input_tokens": item.prompt_tokens,
                "gen_ai.usage.output_tokens": tokens,
            }
        )
        code = str((final.error or {}).get("code", "failed")) if final.status == "failed" else ""
        job.span.end(failed=code)

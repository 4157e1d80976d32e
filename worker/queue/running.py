"""The jobs this worker holds, from claim to acknowledged end. Lives on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import structlog

from headrace.script_types import EmitItem, EmitOutcome, Renewed
from worker.engine.outputs import Output
from worker.engine_thread import AbortRequest, AddRequest, Command
from worker.queue.intake import Admitted
from worker.queue.job import RunningJob
from worker.queue.lease import LeaseKeeper
from worker.queue.publisher import Publisher

log = structlog.get_logger("headrace.jobs")


class RunningJobs:
    """Owns the table of held jobs. A job leaves it when Redis has its end or it is not ours any more."""

    def __init__(self, leases: LeaseKeeper, publisher: Publisher, send: Callable[[Command], None]) -> None:
        self._leases = leases
        self._publisher = publisher
        self._send = send
        self._jobs: dict[str, RunningJob] = {}
        self.requests_sent = 0  # to the engine, since the start

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def take(self, admitted: Admitted) -> None:
        """A freshly claimed job: to the engine, or straight to its terminal event if it was refused."""
        job_id, running = admitted.held.job_id, admitted.running
        if job_id in self._jobs:  # a lease of ours ran out and the job came back under a new epoch
            self._forget(job_id)
        self._jobs[job_id] = running
        self._leases.hold(admitted.held, admitted.claimed_at_s)
        if admitted.request is None:
            self._publish([running])
            return
        log.info("job_claimed", job=job_id, epoch=running.epoch, prompt_tokens=len(running.prompt_ids))
        self.requests_sent += 1
        self._send(AddRequest(admitted.request))

    def absorb(self, outputs: Iterable[Output]) -> None:
        """One step's outputs become events, and the whole batch's events one hand-over to the publisher."""
        touched: dict[str, RunningJob] = {}
        for output in outputs:
            running = self._jobs.get(output.request_id)
            if running is None:
                continue
            touched[output.request_id] = running
            for choice in running.absorb(output):
                self._send(AbortRequest(output.request_id, choice))
        self._publish(touched.values())

    def settle(self, items: Sequence[EmitItem], outcomes: Sequence[EmitOutcome]) -> None:
        """What Redis said to an `emit`."""
        for item, outcome in zip(items, outcomes, strict=True):
            running = self._jobs.get(item.job_id)
            if running is not None and running.epoch == item.epoch:
                self._settle_one(item, running, outcome)

    def _settle_one(self, item: EmitItem, running: RunningJob, outcome: EmitOutcome) -> None:
        if outcome.kind == "cancel":
            self.cancel(item.job_id)
        elif outcome.kind in ("lost", "gap") and not item.force:
            log.warning("log_damaged", job=item.job_id, found=outcome.kind)
            self._send(AbortRequest(item.job_id))
            self._publisher.forget(item.job_id)
            self._publisher.put([running.close_as_lost()])
        elif outcome.kind != "ok":
            log.warning("job_dropped", job=item.job_id, reason=outcome.kind)
            self._forget(item.job_id)
        elif item.final is not None:
            tokens = running.usage().completion_tokens
            log.info("job_ended", job=item.job_id, status=item.final.status, tokens=tokens)
            self._jobs.pop(item.job_id)
            self._leases.drop(item.job_id)

    def reconcile(self, renewed: Renewed) -> None:
        """What a renewal found: leases that are another's by now, and cancel flags."""
        for job_id in renewed.lost:
            if job_id in self._jobs:
                log.warning("lease_lost", job=job_id)
                self._forget(job_id)
        for job_id in renewed.cancelled:
            self.cancel(job_id)

    def cancel(self, job_id: str) -> None:
        """Ends a job as cancelled, with the tokens so far. Unknown and ended jobs are left alone."""
        running = self._jobs.get(job_id)
        if running is None or running.ended:
            return
        self._send(AbortRequest(job_id))
        running.cancel()
        self._publish([running])

    def drop_all(self) -> None:
        """Every lease has run out: the jobs are someone else's, and not a token more leaves here."""
        log.warning("leases_expired", held=len(self._jobs))
        for job_id in list(self._jobs):
            self._forget(job_id)

    def _forget(self, job_id: str) -> None:
        self._send(AbortRequest(job_id))
        self._publisher.forget(job_id)
        self._leases.drop(job_id)
        self._jobs.pop(job_id, None)

    def _publish(self, jobs: Iterable[RunningJob]) -> None:
        self._publisher.put([item for running in jobs if (item := running.take()) is not None])

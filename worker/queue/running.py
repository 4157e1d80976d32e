"""The jobs this worker holds, from claim to acknowledged end. Lives on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import structlog

from headrace.script_types import EmitItem, EmitOutcome, HeldJob, Renewed
from worker.engine.outputs import Output
from worker.engine_thread import AbortRequest, AddRequest, Command
from worker.queue.intake import Admitted
from worker.queue.job import RunningJob
from worker.queue.lease import LeaseKeeper
from worker.queue.publisher import Publisher

log = structlog.get_logger("headrace.jobs")


class RunningJobs:
    """Owns the table of held jobs. A job leaves it when Redis has its end or it is not ours any more."""

    def __init__(
        self,
        leases: LeaseKeeper,
        publisher: Publisher,
        send: Callable[[Command], None],
        on_lost: Callable[[Collection[HeldJob]], None],
    ) -> None:
        self._leases = leases
        self._publisher = publisher
        self._send = send
        self._on_lost = on_lost
        self._jobs: dict[str, RunningJob] = {}
        self._probation: dict[str, int] = {}  # tokens that suspects have yet to say
        self.requests_sent = 0  # to the engine, since the start

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    @property
    def apart(self) -> bool:
        """Whether suspects run here, beside which nothing else may."""
        return bool(self._probation)

    def take(self, admitted: Admitted) -> None:
        """A freshly claimed job: to the engine, or straight to its terminal event if it was refused."""
        job_id, running = admitted.held.job_id, admitted.running
        if job_id in self._jobs:  # a lease of ours ran out and the job came back under a new epoch
            self._lose([job_id])
        self._jobs[job_id] = running
        if admitted.probation_tokens and admitted.request is not None:
            self._probation[job_id] = admitted.probation_tokens
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
            self._pass_probation(output.request_id)
            for choice in running.absorb(output):
                self._send(AbortRequest(output.request_id, choice))
        for job_id, running in touched.items():
            if running.ended:
                self._probation.pop(job_id, None)
        self._publish(touched.values())

    def _pass_probation(self, job_id: str) -> None:
        left = self._probation.get(job_id)
        if left is not None and left > 1:
            self._probation[job_id] = left - 1
        elif left is not None:
            log.info("suspect_cleared", job=job_id)
            del self._probation[job_id]

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
            self._lose([item.job_id])
        elif item.final is not None:
            tokens = running.usage().completion_tokens
            log.info("job_ended", job=item.job_id, status=item.final.status, tokens=tokens)
            self._jobs.pop(item.job_id)
            self._probation.pop(item.job_id, None)
            self._leases.drop(item.job_id)

    def reconcile(self, renewed: Renewed) -> None:
        """What a renewal found: leases that are another's by now, and cancel flags."""
        lost = [job_id for job_id in renewed.lost if job_id in self._jobs]
        if lost:
            log.warning("leases_lost", jobs=len(lost), first=lost[0])
            self._lose(lost)
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
        self._lose(list(self._jobs))

    def let_go(self, job_ids: Collection[str]) -> list[HeldJob]:
        """Stops these, to be given back. What they have said may still be on its way to Redis."""
        held = []
        for job_id in job_ids:
            running = self._jobs.pop(job_id, None)
            self._probation.pop(job_id, None)
            if running is not None:
                held.append(self._held(running))
                self._send(AbortRequest(job_id))
        return held

    def let_all_go(self) -> list[HeldJob]:
        return self.let_go(list(self._jobs))

    def _lose(self, job_ids: Sequence[str]) -> None:
        lost = [self._held(self._jobs[job_id]) for job_id in job_ids]
        for job_id in job_ids:
            self._forget(job_id)
        if lost:
            self._on_lost(lost)

    @staticmethod
    def _held(running: RunningJob) -> HeldJob:
        return HeldJob(running.job.job_class, running.job.entry_id, running.job.id, running.epoch)

    def _forget(self, job_id: str) -> None:
        self._send(AbortRequest(job_id))
        self._publisher.forget(job_id)
        self._leases.drop(job_id)
        self._jobs.pop(job_id, None)
        self._probation.pop(job_id, None)

    def _publish(self, jobs: Iterable[RunningJob]) -> None:
        self._publisher.put([item for running in jobs if (item := running.take()) is not None])

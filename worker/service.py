"""The worker's life: start, serve, drain. The only file that knows both the engine thread and asyncio.

Engine thread → event loop: one hand-over a step. Event loop → engine thread: commands before the next step.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

import structlog
from redis.exceptions import RedisError

from headrace.config import WorkerSettings
from headrace.connect import connect, connect_sync
from headrace.keys import Keys
from headrace.script_types import EmitItem, EmitOutcome, HeldJob, Renewed
from headrace.scripts import Scripts, SyncScripts
from headrace.submission import Limits
from headrace.tracing import start_tracing
from worker.engine.engine import Engine
from worker.engine_thread import EngineThread, StepReport
from worker.mailbox import Mailbox
from worker.metrics import Live, WorkerMetrics
from worker.queue.card import REFRESH_S, Card, Utilisation, card_numbers
from worker.queue.claimer import Claimer
from worker.queue.control import ControlChannel, EntryWatcher
from worker.queue.intake import Admitted, Intake, ServedModel
from worker.queue.lease import LeaseCallbacks, LeaseKeeper
from worker.queue.publisher import Publisher
from worker.queue.returns import Returns
from worker.queue.running import RunningJobs
from worker.tracing import JobTraces
from worker.watchdog import Watchdog

log = structlog.get_logger("headrace.worker")

MAX_BACKLOG_EVENTS = 8_192  # events Redis has not acknowledged; above it the engine waits
OVERDUE_S = 0.25  # how late a job that waits may be told that its time is over
REAP_S = 10.0
REDIS_RETRY_S = 0.5


class WorkerService:
    """One worker process serving one model of one pool. Built and run inside a running event loop."""

    def __init__(
        self, settings: WorkerSettings, engine: Engine, model: ServedModel, card: Mapping[str, str | int]
    ) -> None:
        self._settings = settings
        self._keys = Keys(settings.pool)
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(self._loop)
        self._redis = connect(settings.redis_url)
        self._blocking = connect(settings.redis_url, blocking=True)
        self._pubsub = connect(settings.redis_url, blocking=True)
        self._sync_redis = connect_sync(settings.redis_url, tag=settings.pool)
        self._scripts = Scripts(self._redis, self._keys)
        self._report: StepReport | None = None
        self._utilisation = Utilisation()
        self._draining = asyncio.Event()
        self._fatal: BaseException | None = None
        self._told_ready = False
        self._checks: set[asyncio.Task[None]] = set()
        self._publisher = Publisher(
            self._scripts, retention_ms=settings.retention_ms, on_outcomes=self._settle
        )
        self._leases = self._lease_keeper()
        self._returns = Returns(self._scripts, settings.worker_id, self._publisher, self._leases)
        self._engine = EngineThread(
            engine,
            may_run=self._may_run,
            on_report=lambda report: self._mailbox.post(self._handle_report, report),
            on_fatal=lambda error: self._mailbox.post(self._handle_fatal, error),
        )
        self._watchdog = Watchdog(self._engine.stuck_s, settings.stall_timeout_s)
        self._reported = asyncio.Event()
        self._jobs = RunningJobs(self._leases, self._publisher, self._engine.send, self._handle_lost)
        self._claimer = Claimer(
            self._scripts,
            self._intake(model),
            EntryWatcher(self._blocking, self._keys, lease_ms=settings.lease_ms),
            worker_id=settings.worker_id,
            lease_ms=settings.lease_ms,
            room=self._room,
            take=self._take,
            held=self._leases.held,
            holds_nothing=lambda: len(self._jobs) == 0,
            give_back=self._give_back,
        )
        self._control = ControlChannel(
            self._pubsub,
            self._keys,
            worker_id=settings.worker_id,
            on_cancel=self._handle_cancel_hint,
            on_ready=self._claimer.wake,
            on_drain=self._draining.set,
        )
        self._card = Card(self._redis, self._keys, settings.worker_id, card)
        info = {"pool": settings.pool, "worker": settings.worker_id, "model": model.name}
        self._metrics = WorkerMetrics(self._live, info | {"fingerprint": model.fingerprint})
        tracing = start_tracing("headrace-worker")
        self._traces = JobTraces(tracing, settings.worker_id, model.name) if tracing else None

    def _lease_keeper(self) -> LeaseKeeper:
        def on_renewed(renewed: Renewed) -> None:
            self._metrics.leases_lost(len(renewed.lost))
            self._mailbox.post(self._jobs.reconcile, renewed)

        def on_expired() -> None:
            self._metrics.leases_expired()
            self._mailbox.post(self._jobs.drop_all)

        return LeaseKeeper(
            SyncScripts(self._sync_redis, self._keys),
            self._settings.worker_id,
            lease_ms=self._settings.lease_ms,
            callbacks=LeaseCallbacks(on_renewed, on_expired),
        )

    def _intake(self, model: ServedModel) -> Intake:
        return Intake(
            self._redis,
            self._scripts,
            self._keys,
            model,
            worker_id=self._settings.worker_id,
            lease_ms=self._settings.lease_ms,
            max_attempts=self._settings.max_attempts,
            retention_ms=self._settings.retention_ms,
            default_max_tokens=self._settings.default_max_tokens,
            limits=Limits(max_body_bytes=self._settings.max_body_bytes),
        )

    async def run(self) -> int:
        """Serves until told to drain. Returns the process's exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._handle_signal)
        if self._settings.metrics_port:
            self._metrics.serve(self._settings.metrics_host, self._settings.metrics_port)
        await self._wait_for_redis()
        self._engine.start()
        await self._reported.wait()  # nothing is said of this worker, and nothing claimed, without it
        self._watchdog.start()
        self._leases.start()
        publisher = asyncio.create_task(self._publisher.run())
        claimer = asyncio.create_task(self._claimer.run())
        loops = self._start_loops()
        stop = asyncio.create_task(self._draining.wait())
        done, _ = await asyncio.wait([publisher, claimer, stop, *loops], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stop}:
            self._fatal = self._fatal or task.exception()
            log.error("worker_task_failed", exc_info=task.exception())
        await self._cancelled(stop, *loops)
        await self._drain(publisher, claimer)
        return 0 if self._fatal is None else 1

    def _start_loops(self) -> list[asyncio.Task[None]]:
        loops: list[Coroutine[Any, Any, None]] = [
            self._claimer.watch(),
            self._control.run(),
            self._every(REFRESH_S, self._write_card),
            self._every(OVERDUE_S, self._end_overdue),
            self._every(REAP_S, self._reap),
        ]
        return [asyncio.create_task(loop) for loop in loops]

    def _handle_signal(self) -> None:
        if self._draining.is_set():
            log.warning("worker_leaves_at_once", held=len(self._jobs))
            os._exit(130)
        log.info("worker_drains", held=len(self._jobs))
        self._draining.set()

    async def _wait_for_redis(self) -> None:
        told = False
        while not self._draining.is_set():
            try:
                await self._redis.ping()
                return
            except (RedisError, OSError) as error:
                if not told:
                    log.warning("redis_unreachable", error=str(error), advice="waiting until it answers")
                told = True
            with suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), REDIS_RETRY_S)

    async def _drain(self, publisher: asyncio.Task[None], claimer: asyncio.Task[None]) -> None:
        """Gives back what runs, with all its tokens in the log: another worker goes on from there at once."""
        timeout_s = self._settings.drain_timeout_s
        self._claimer.stop()
        self._reported.set()
        stopped = await asyncio.to_thread(self._engine.stop, timeout_s)
        # The step under way and the claims under way end; what they bring is given back with the rest.
        await asyncio.wait([claimer], timeout=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                if self._leases.valid() and not publisher.done():
                    await self._publisher.flush()
                held = self._leases.held()
                if held:
                    await self._scripts.release(self._settings.worker_id, held)
                await self._card.remove()
            log.info("worker_drained", released=len(held), engine_stopped=stopped)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("drain_incomplete", error=type(error).__name__, held=len(self._leases.held()))
        await self._cancelled(publisher, claimer, *self._checks)
        await asyncio.to_thread(self._leases.stop)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        self._mailbox.close()
        self._sync_redis.close()
        for client in (self._redis, self._blocking, self._pubsub):
            with suppress(RedisError, OSError):
                await client.aclose()

    @staticmethod
    async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- from the engine thread

    def _may_run(self) -> bool:
        return self._leases.valid() and self._publisher.backlog_events < MAX_BACKLOG_EVENTS

    def _handle_report(self, report: StepReport) -> None:
        self._report = report
        self._utilisation.add(report.stats)
        self._reported.set()
        apart = self._jobs.apart
        self._jobs.absorb(report.outputs)
        if report.displaced:
            self._spawn(self._returns.release_displaced(self._jobs, report.displaced))
        cleared = apart and not self._jobs.apart
        if (self._claimer.waiting or cleared) and any(requests > 0 for requests, _ in self._room()):
            self._claimer.wake()

    def _handle_fatal(self, error: BaseException) -> None:
        self._fatal = error
        self._reported.set()
        self._draining.set()

    def _room(self) -> list[tuple[int, int]]:
        report = self._report
        if report is None or self._jobs.apart or not self._may_run():
            return [(0, 0)]
        on_their_way = self._jobs.requests_sent - report.added_total
        return [(max(requests - on_their_way, 0), tokens) for requests, tokens in report.room]

    # --- from Redis

    def _take(self, admitted: Admitted) -> None:
        self._metrics.took(admitted)
        if self._traces is not None:
            self._traces.took(admitted)
        self._jobs.take(admitted)

    def _settle(self, items: Sequence[EmitItem], outcomes: Sequence[EmitOutcome]) -> None:
        self._metrics.settled(items, outcomes)
        if self._traces is not None:
            self._traces.settled(items, outcomes)
        self._jobs.settle(items, outcomes)
        self._engine.nudge()

    async def _give_back(self) -> None:
        """Empties this worker: suspects wait for one that risks nothing else."""
        held = self._jobs.let_all_go()
        log.info("makes_room_for_suspects", released=len(held))
        await self._returns.release(held)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.lease_ms / 1000):
                while self._engine_has_work() and not self._draining.is_set():
                    self._reported.clear()
                    await self._reported.wait()

    def _engine_has_work(self) -> bool:
        return self._report is not None and self._report.stats.running + self._report.stats.waiting > 0

    def _handle_lost(self, lost: Collection[HeldJob]) -> None:
        self._spawn(self._returns.make_good(list(lost)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    def _handle_cancel_hint(self, job_id: str) -> None:
        if job_id in self._jobs:
            self._spawn(self._check_cancel(job_id))

    async def _check_cancel(self, job_id: str) -> None:
        # The channel is a hint that anybody may send; the flag in the job's hash is the truth.
        with suppress(RedisError, OSError):
            flag: Any = await self._redis.hget(self._keys.job(job_id), "cancel")  # type: ignore[misc]
            if flag == b"1":
                self._jobs.cancel(job_id)

    # --- housekeeping

    def _live(self) -> Live:
        return Live(
            stats=self._report.stats if self._report else None,
            sums=self._utilisation.sums(),
            queued=self._claimer.waiting,
            held=len(self._jobs),
            backlog_events=self._publisher.backlog_events,
            lease_valid=self._leases.valid(),
        )

    async def _every(self, interval_s: float, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            with suppress(RedisError, OSError):
                await action()
            await asyncio.sleep(interval_s)

    async def _write_card(self) -> None:
        if self._report is not None:
            stats = self._report.stats
            held = {"held": len(self._jobs)}
            for observer in (self._metrics, self._traces):
                if observer is not None:
                    observer.keep(self._jobs.__contains__)
            await self._card.write(held | card_numbers(stats) | self._utilisation.sums())
            self._tell_ready()

    def _tell_ready(self) -> None:
        if not self._told_ready:
            log.info("worker_ready", worker=self._settings.worker_id, pool=self._settings.pool)
        self._told_ready = True

    async def _end_overdue(self) -> None:
        if await self._scripts.overdue():
            await self._reap()

    async def _reap(self) -> None:
        await self._scripts.reap(retention_ms=self._settings.retention_ms)

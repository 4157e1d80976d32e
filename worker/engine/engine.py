"""The engine's loop: plan, run, apply, hand over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from worker.engine.isolation import run_isolated
from worker.engine.outputs import Output
from worker.engine.plan import StepPlan, StepResult
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.engine.stats import EngineStats


class Runner(Protocol):
    """Computes plans. A plan that raised may be run again in parts: running a chunk twice must do no harm."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def forget(self, seq_id: int) -> None:
        """Nothing of this sequence is kept any more; if it comes back it starts again from its tokens."""


class Engine:
    """Owned by one thread. `clock` is monotonic, in seconds; requests' arrival and deadline are on it."""

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Raises HeadraceError: invalid_request, conflict (id in use), context_length_exceeded, capacity."""
        self.scheduler.add(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice, without output; its blocks are free at once. Unknown ids: nothing."""
        self.scheduler.abort(request_id, choice)

    def step(self) -> list[Output]:
        """One step. No output while `has_work` may mean that nothing can run before `wake_at`."""
        plan = self.scheduler.plan(self.clock())
        self._forget_released()
        if plan is not None:
            started_s = self.clock()
            result = run_isolated(self.runner.run, plan)
            ended_s = self.clock()
            self.scheduler.apply(plan, result, ended_s, ended_s - started_s)
            self._forget_released()
        return self.scheduler.take_outputs()

    def wake_at(self) -> float | None:
        """When a batch that waits for company starts, or the next deadline, on the clock."""
        return self.scheduler.wake_at()

    def admissible(self, priority: int = 2) -> tuple[int, int]:
        """Requests of this class that could start now, and the free KV tokens for them."""
        return self.scheduler.admissible(priority)

    def displaced(self) -> tuple[str, ...]:
        """Requests that higher classes have kept waiting since they took their places."""
        return self.scheduler.displaced()

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def _forget_released(self) -> None:
        """Before a run, too: a preempted sequence may be part of the very next plan, from its start."""
        for seq_id in self.scheduler.take_released():
            self.runner.forget(seq_id)

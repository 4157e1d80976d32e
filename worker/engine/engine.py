"""The engine's loop: plan, run, apply, hand over."""

from __future__ import annotations

from collections.abc import Callable

from worker.engine.outputs import Output
from worker.engine.pipeline import Runner, make_steps
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.engine.stats import EngineStats


class Engine:
    """Owned by one thread. `clock` is monotonic, in seconds; requests' arrival and deadline are on it.

    A scheduler that plans ahead takes a runner that launches.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float]) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self._steps = make_steps(runner, clock, plan_ahead=scheduler.config.plan_ahead)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or len(self._steps) > 0

    def add(self, request: Request) -> None:
        """Raises HeadraceError: invalid_request, conflict (id in use), context_length_exceeded, capacity."""
        self.scheduler.add(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice, without output; its blocks are free at once. Unknown ids: nothing."""
        self.scheduler.abort(request_id, choice)

    def step(self) -> list[Output]:
        """One step's result. No output while `has_work` may mean that nothing can run before `wake_at`."""
        while self._steps.has_room:
            plan = self.scheduler.plan(self.clock())
            self._forget_released()
            if plan is None:
                break
            self._steps.launch(plan)
        for done in self._steps.settle():
            self.scheduler.apply(done.plan, done.result, done.ended_s, done.duration_s)
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

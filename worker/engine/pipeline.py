"""Steps between their plan and their result: at most one that is computed, and one launched behind it.

A runner that launches queues a step and returns; the device computes one step after the other, so that the
one behind may read the tokens that the one before draws, and never has to wait for the host. Any other
runner computes a step when its result is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from worker.engine.isolation import run_isolated
from worker.engine.plan import StepPlan, StepResult


class Runner(Protocol):
    """Computes plans. A plan that raised may be run again in parts: running a chunk twice must do no harm."""

    def run(self, plan: StepPlan) -> StepResult: ...

    def forget(self, seq_id: int) -> None:
        """Nothing of this sequence is kept any more; if it comes back it starts again from its tokens.

        Said in the order of launches: a step launched before may still be at it.
        """


class Launched(Protocol):
    """A step that was queued."""

    def result(self) -> StepResult:
        """Waits for it. Raises what went wrong in it, if anything did."""


@runtime_checkable
class LaunchingRunner(Runner, Protocol):
    """Computes plans in the order of launches. Tokens that are `pending` come from the launch before."""

    def launch(self, plan: StepPlan) -> Launched: ...


@dataclass(frozen=True, slots=True)
class Settled:
    plan: StepPlan
    result: StepResult
    ended_s: float  # on the clock
    duration_s: float  # since it was launched, or the step before it was over


class Serial:
    """One step at a time."""

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self.runner = runner
        self._clock = clock
        self._plan: StepPlan | None = None

    def __len__(self) -> int:
        return int(self._plan is not None)

    @property
    def has_room(self) -> bool:
        return self._plan is None

    def launch(self, plan: StepPlan) -> None:
        self._plan = plan

    def settle(self) -> Iterator[Settled]:
        plan, self._plan = self._plan, None
        if plan is not None:
            started_s = self._clock()
            result = run_isolated(self.runner.run, plan)
            ended_s = self._clock()
            yield Settled(plan, result, ended_s, ended_s - started_s)


class Pipeline:
    """Two steps at a time: the one behind is queued before the result of the first is awaited."""

    def __init__(self, runner: LaunchingRunner, clock: Callable[[], float]) -> None:
        self.runner = runner
        self._clock = clock
        self._flights: deque[_Flight] = deque()
        self._settled_s = float("-inf")

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def has_room(self) -> bool:
        return len(self._flights) < 2

    def launch(self, plan: StepPlan) -> None:
        started_s, launched = self._clock(), None
        with suppress(Exception):  # once it is its turn it is run again, with all behind it, and told then
            launched = self.runner.launch(plan)
        self._flights.append(_Flight(plan, launched, started_s))

    def settle(self) -> Iterator[Settled]:
        """The oldest step; if it failed, all of them. Each is to be applied before the next is asked for."""
        if not self._flights:
            return
        flight = self._flights[0]
        try:
            result = flight.result()
        except Exception:
            yield from self._run_again()
        else:
            yield self._settled(self._flights.popleft(), result)

    def _run_again(self) -> Iterator[Settled]:
        """The device at rest: what was launched behind a step that failed has read what is not so."""
        for flight in list(self._flights)[1:]:
            with suppress(Exception):
                flight.result()
        while self._flights:
            flight = self._flights.popleft()
            yield self._settled(flight, run_isolated(self.runner.run, flight.plan.known()))

    def _settled(self, flight: _Flight, result: StepResult) -> Settled:
        started_s, self._settled_s = max(flight.started_s, self._settled_s), self._clock()
        return Settled(flight.plan, result, self._settled_s, self._settled_s - started_s)


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    launched: Launched | None  # None: that failed
    started_s: float

    def result(self) -> StepResult:
        if self.launched is None:
            raise RuntimeError("the step could not be launched")
        return self.launched.result()


def make_steps(runner: Runner, clock: Callable[[], float], *, plan_ahead: bool) -> Serial | Pipeline:
    """Raises TypeError where steps are planned ahead for a runner that can't launch them."""
    if not plan_ahead:
        return Serial(runner, clock)
    if not isinstance(runner, LaunchingRunner):
        raise TypeError(f"plan_ahead: {type(runner).__name__} has no `launch`")
    return Pipeline(runner, clock)

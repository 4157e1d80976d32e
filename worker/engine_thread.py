"""The engine runs on a thread of its own: commands in, one report a step out. It knows nothing of sockets."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from headrace.errors import HeadraceError
from headrace.messages import CLASSES
from worker.engine.engine import Engine
from worker.engine.outputs import FailedOutput, Output
from worker.engine.request import Request
from worker.engine.stats import EngineStats

log = structlog.get_logger("headrace.engine")

NUM_CLASSES = len(CLASSES)
PAUSE_RECHECK_S = 0.05  # how soon a paused engine looks again whether it may go on
ROOM_STEPS = 8  # how often room is looked at while nobody comes or goes: it shrinks as answers grow


@dataclass(frozen=True, slots=True)
class AddRequest:
    request: Request


@dataclass(frozen=True, slots=True)
class AbortRequest:
    request_id: str
    choice: int | None = None


Command = AddRequest | AbortRequest


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one turn of the loop leaves: outputs in order, and the engine's state after it."""

    outputs: tuple[Output, ...]
    stats: EngineStats
    room: tuple[tuple[int, int], ...]  # by class, highest first: requests and tokens that could start now
    displaced: tuple[str, ...]  # requests that wait here behind higher classes and could go on elsewhere
    added_total: int  # requests taken in since the start, so that the claimer can count those on their way


class EngineThread:
    """Drives `engine` while it has work. `on_report` is called on this thread and must only hand over.

    `may_run` is asked before every step: no lease or too long a backlog holds the engine and
    loses nothing. `on_fatal` is called once if the engine itself breaks; the thread then ends.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        may_run: Callable[[], bool],
        on_report: Callable[[StepReport], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._may_run = may_run
        self._on_report = on_report
        self._on_fatal = on_fatal
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._added_total = 0
        self._room = _Room(engine)
        self._step = -1
        self._step_began_s: float | None = None
        self._stalled = False  # the last step had nothing to compute: only time or a command changes that
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, *commands: Command) -> None:
        """Commands are carried out in order, before the next step."""
        with self._wake:
            self._commands.extend(commands)
            self._wake.notify()

    def nudge(self) -> None:
        """Something that `may_run` looks at has changed."""
        with self._wake:
            self._wake.notify()

    def stuck_s(self) -> float:
        """For how long the step under way has been computed; 0 when none is."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def stop(self, timeout_s: float) -> bool:
        """Ends after the step under way. Returns whether the thread has ended in time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._step = self._report([]).step
            while (commands := self._next_commands()) is not None:
                outputs = self._carry_out(commands)
                stepped = self._engine.has_work and self._may_run()
                if stepped:
                    self._step_began_s = time.monotonic()
                    outputs.extend(self._engine.step())
                    self._step_began_s = None
                step_before, self._step = self._step, self._report(outputs).step
                self._stalled = stepped and self._step == step_before
        except BaseException as error:
            log.exception("engine_broken")
            self._on_fatal(error)

    def _next_commands(self) -> list[Command] | None:
        """Waits until there is something to do; None when it is time to end."""
        with self._wake:
            while not self._stopping:
                wait_s = self._wait_s()
                if self._commands or wait_s == 0:
                    commands = list(self._commands)
                    self._commands.clear()
                    return commands
                self._wake.wait(wait_s)
            return None

    def _wait_s(self) -> float | None:
        """How long nothing can be done without a new command: 0 for not at all, None for ever."""
        if not self._engine.has_work:
            return None
        if not self._may_run():
            return PAUSE_RECHECK_S
        if not self._stalled:
            return 0
        wake_at_s = self._engine.wake_at()
        return None if wake_at_s is None else max(wake_at_s - self._engine.clock(), 0)

    def _carry_out(self, commands: list[Command]) -> list[Output]:
        outputs: list[Output] = []
        for command in commands:
            if isinstance(command, AbortRequest):
                self._engine.abort(command.request_id, command.choice)
                continue
            self._added_total += 1
            try:
                self._engine.add(command.request)
            except HeadraceError as error:
                outputs.append(FailedOutput(command.request.request_id, error))
        return outputs

    def _report(self, outputs: list[Output]) -> EngineStats:
        stats = self._engine.stats()
        room = self._room.at(stats)
        self._on_report(StepReport(tuple(outputs), stats, room, self._engine.displaced(), self._added_total))
        return stats


class _Room:
    """What could start now, by class; it takes a look at every running request, so not at every step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: tuple[int, ...] | None = None
        self._room: tuple[tuple[int, int], ...] = ()

    def at(self, stats: EngineStats) -> tuple[tuple[int, int], ...]:
        left = stats.finished_choices + stats.failed_requests + stats.aborted_requests + stats.preemptions
        counts = (stats.running, stats.waiting, stats.slots_used, stats.seq_budget)
        seen = (left, *counts, stats.step // ROOM_STEPS)
        if seen != self._seen:
            self._seen = seen
            self._room = tuple(self._engine.admissible(priority) for priority in range(NUM_CLASSES))
        return self._room

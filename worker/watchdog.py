"""A stuck engine behind a live event loop would keep its leases for ever: it is noticed, said, and left.

A step that never returns cannot be interrupted from outside. The process ends; its leases run out, and other
workers go on with its jobs from their logs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import structlog

log = structlog.get_logger("headrace.watchdog")

EXIT_STUCK = 70


def leave(stuck_s: float) -> None:
    """Ends the process at once: nothing of it can be waited for."""
    log.critical(
        "engine_stuck", seconds=round(stuck_s, 1), advice="the process ends; other workers take over"
    )
    os._exit(EXIT_STUCK)


class Watchdog:
    """Asks `stuck_s()` for how long the step under way has been computed. `limit_s` 0: never acts.

    A thread of its own, so that it sees an event loop that hangs as well.
    """

    def __init__(
        self, stuck_s: Callable[[], float], limit_s: float, on_stuck: Callable[[float], None] = leave
    ) -> None:
        self._stuck_s = stuck_s
        self._limit_s = limit_s
        self._on_stuck = on_stuck
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        if self._limit_s:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self._limit_s / 10):
            if (stuck_s := self._stuck_s()) > self._limit_s:
                self._on_stuck(stuck_s)
                return

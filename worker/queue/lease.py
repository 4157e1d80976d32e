"""Leases are renewed on a thread with a socket of its own: no prefill, no busy event loop starves it.

A frozen process does not renew, and that is the point: its jobs go to another worker, the epoch fences it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from redis.exceptions import RedisError

from headrace.script_types import HeldJob, Renewed
from headrace.scripts import SyncScripts

log = structlog.get_logger("headrace.lease")


@dataclass(frozen=True, slots=True)
class LeaseCallbacks:
    """Called on the lease thread; each must hand over and return at once."""

    on_renewed: Callable[[Renewed], None]  # what was lost, what has been cancelled
    on_expired: Callable[[], None]  # Redis has been out of reach for longer than the lease


class LeaseKeeper:
    """Renews what is held at a third of the lease and knows until when the leases are surely ours."""

    def __init__(
        self, scripts: SyncScripts, worker_id: str, *, lease_ms: int, callbacks: LeaseCallbacks
    ) -> None:
        self._scripts = scripts
        self._worker_id = worker_id
        self._lease_ms = lease_ms
        self._callbacks = callbacks
        self._lock = threading.Lock()
        self._held: dict[str, HeldJob] = {}
        self._valid_until_s = float("inf")  # nothing held, nothing to lose
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=self._lease_ms / 1000)

    def hold(self, job: HeldJob, claimed_at_s: float) -> None:
        """From now on `job` is renewed. `claimed_at_s`: monotonic time just before the claim was sent."""
        with self._lock:
            if not self._held:
                self._valid_until_s = claimed_at_s + self._lease_ms / 1000
            self._held[job.job_id] = job

    def drop(self, job_id: str) -> None:
        with self._lock:
            self._held.pop(job_id, None)

    def held(self) -> list[HeldJob]:
        with self._lock:
            return list(self._held.values())

    def valid(self) -> bool:
        """Whether tokens computed now can still be ours. Cheap: asked before every step."""
        with self._lock:
            return not self._held or time.monotonic() < self._valid_until_s

    def _run(self) -> None:
        failing = False
        while not self._stop.wait(self._lease_ms / 3000):
            held = self.held()
            if not held:
                continue
            sent_at_s = time.monotonic()
            try:
                renewed = self._scripts.renew(self._worker_id, held, lease_ms=self._lease_ms)
            except (RedisError, OSError) as error:
                if not failing:
                    log.warning("lease_renewal_failing", error=type(error).__name__, held=len(held))
                failing = True
                self._check_expiry()
                continue
            if failing:
                log.info("lease_renewal_recovered")
            failing = False
            with self._lock:
                self._valid_until_s = sent_at_s + self._lease_ms / 1000
            if renewed.lost or renewed.cancelled:
                self._callbacks.on_renewed(renewed)

    def _check_expiry(self) -> None:
        if not self.valid():
            self._callbacks.on_expired()

"""`headrace up`: Redis, workers and the gateway on one machine, to the first answer, and down again."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import redis

from headrace.cli.check import answer_one_prompt
from headrace.cli.children import Child, python_module
from headrace.cli.options import tell_error
from headrace.cli.plan import Plan
from headrace.cli.screen import Screen, try_it
from headrace.config import WorkerSettings, redact_url
from headrace.connect import connect_sync
from headrace.embedded import EmbeddedRedis
from headrace.keys import Keys
from headrace.models import SIMULATED, ModelError, resolve_model

POLL_S = 0.1
EXTRA_DRAIN_S = 10.0
FRONT = ("gateway", "tasks")


class UpError(Exception):
    """Something that `up` needs did not come up or went away. The text is for the user."""


class StoppedError(Exception):
    """The user asked to stop while things were starting."""


class Stack:
    """All that `up` runs. `close` leaves no process and no lost job, whatever had started."""

    def __init__(self, plan: Plan, screen: Screen) -> None:
        self._plan = plan
        self._screen = screen
        self._keys = Keys(plan.worker.pool)
        self._redis: EmbeddedRedis | None = None
        self._redis_url = plan.worker.redis_url
        self._worker_ids: dict[str, str] = {}
        self._children: list[Child] = []
        self._stop = threading.Event()

    def run(self) -> int:
        """Serves until SIGINT or SIGTERM. Returns the exit status."""
        with self._signals():
            try:
                self._start()
                self._supervise()
                status = 0
            except StoppedError:
                status = 0
            except ModelError:
                if not self._stop.is_set():  # else Ctrl-C ended the download
                    raise
                status = 0
            except UpError as problem:
                tell_error(str(problem))
                status = 1
            finally:
                self._close()
            return status

    def _start(self) -> None:
        began_s = time.monotonic()
        model = self._model()
        self._start_redis()
        self._children = self._make_children(model)
        for child in self._children:
            child.start()
        self._screen.say(f"loading {Path(model).name}")
        self._wait_for("the gateway", self._gateway_is_ready)
        self._wait_for("the workers", self._workers_are_ready)
        check = self._answer_one_prompt()
        self._start_tasks()
        self._screen.say(f"{check} (up in {time.monotonic() - began_s:.1f} s)", "green")
        needs_key = bool(self._plan.gateway.api_keys) and not self._plan.gateway.allow_anonymous
        urls = (self._redis_url, self._plan.gateway_url)
        self._screen.say(try_it(*urls, self._plan.worker.pool, needs_key=needs_key))

    def _model(self) -> str:
        """A path, so that all workers load the same files."""
        name = self._plan.worker.model
        if name and name.partition(":")[0] == SIMULATED:
            return name
        return str(resolve_model(name, self._plan.worker.cache_dir))

    def _start_redis(self) -> None:
        if not self._plan.own_redis:
            with connect_sync(self._redis_url, tag=self._plan.worker.pool) as client:
                try:
                    client.ping()
                except (redis.RedisError, OSError) as problem:
                    raise UpError(f"no Redis at {redact_url(self._redis_url)}: {problem}") from problem
            return
        self._redis = EmbeddedRedis(Path(self._plan.worker.cache_dir).expanduser() / "redis").start()
        self._redis_url = self._redis.url
        self._screen.say(f"Redis on {self._redis_url}, data in {self._redis.data_dir}")

    def _make_children(self, model: str) -> list[Child]:
        show = self._screen.show_child
        count = self._plan.num_workers
        names = ["worker"] if count == 1 else [f"worker-{number}" for number in range(1, count + 1)]
        worker, gateway = python_module("worker"), python_module("gateway")
        workers = [Child(name, worker, partial(self._worker_env, name, model), show) for name in names]
        return [*workers, Child("gateway", gateway, self._gateway_env, show)]

    def _start_tasks(self) -> None:
        """Webhooks and batches, last: the first answer does not need them."""
        tasks = Child("tasks", python_module("gateway.tasks"), self._common_env, self._screen.show_child)
        self._children.append(tasks)
        tasks.start()

    def _worker_env(self, name: str, model: str) -> Mapping[str, str]:
        worker, count = self._plan.worker, self._plan.num_workers
        # A worker that is started again is another worker: its name is its lease.
        fresh = WorkerSettings().worker_id if name in self._worker_ids else worker.worker_id
        self._worker_ids[name] = fresh if count == 1 else f"{fresh}-{name}"
        return self._common_env() | {
            "HEADRACE_WORKER_ID": self._worker_ids[name],
            "HEADRACE_MODEL": model,
            "HEADRACE_DEVICE": worker.device,
            "HEADRACE_THREADS": str(worker.threads or max(1, (os.cpu_count() or 1) // count)),
        }

    def _gateway_env(self) -> Mapping[str, str]:
        gateway = self._plan.gateway
        return self._common_env() | {"HEADRACE_HOST": gateway.host, "HEADRACE_PORT": str(gateway.port)}

    def _common_env(self) -> dict[str, str]:
        # In the environment, not on the command line, where a password would be seen by all.
        return os.environ | {
            "HEADRACE_REDIS_URL": self._redis_url,
            "HEADRACE_POOL": self._plan.worker.pool,
            "HEADRACE_LOG_LEVEL": self._plan.worker.log_level,
            "TQDM_DISABLE": "1",  # bars of several processes in one terminal are noise
        }

    def _wait_for(self, what: str, is_ready: Callable[[], bool]) -> None:
        while not is_ready():
            self._require_all_alive(f"{what} did not come up")
            self._pause()

    def _require_all_alive(self, problem: str) -> None:
        for child in self._children:
            if child.poll() is not None:
                raise UpError(f"{problem}: {child.last_words()}")
        self._require_redis()

    def _require_redis(self) -> None:
        if self._redis is not None and self._redis.poll() is not None:
            raise UpError(f"Redis ended: {self._redis.last_words()} (log: {self._redis.log_path})")

    def _pause(self) -> None:
        if self._stop.wait(POLL_S):
            raise StoppedError

    def _gateway_is_ready(self) -> bool:
        host = self._plan.gateway_url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=2)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _workers_are_ready(self) -> bool:
        cards = [self._keys.worker(worker_id) for worker_id in self._worker_ids.values()]
        with connect_sync(self._redis_url, tag=self._plan.worker.pool) as client:
            try:
                return client.exists(*cards) == len(cards)
            except (redis.RedisError, OSError):
                return False

    def _answer_one_prompt(self) -> str:
        check = answer_one_prompt(self._redis_url, self._plan.worker.pool)
        outcome: list[str | BaseException] = []

        def run() -> None:
            try:
                outcome.append(asyncio.run(check))
            except Exception as problem:
                outcome.append(problem)

        # In a thread, so that a worker that dies over it, or Ctrl-C, is noticed at once.
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            self._require_all_alive("the first prompt was not answered")
            self._pause()
        if isinstance(outcome[0], BaseException):
            raise UpError(f"the first prompt was not answered: {outcome[0]}") from outcome[0]
        return outcome[0]

    def _supervise(self) -> None:
        while not self._stop.wait(POLL_S):
            self._require_redis()
            for child in self._children:
                if child.poll() is not None:
                    self._restart(child)

    def _restart(self, child: Child) -> None:
        words = child.last_words()
        if not child.may_restart():
            raise UpError(f"{words} (again and again: giving up)")
        self._screen.say(f"{words}; starting it again", "yellow")
        child.start()

    def _close(self) -> None:
        """The gateway first, while workers still answer its streams; Redis last, with the jobs given back."""
        gateways = [child for child in self._children if child.name in FRONT]
        workers = [child for child in self._children if child.name not in FRONT]
        for group in (gateways, workers):
            self._end(group)
        if self._redis is not None:
            self._redis.close()

    def _end(self, children: list[Child]) -> None:
        for child in children:
            child.terminate()
        until = time.monotonic() + self._plan.worker.drain_timeout_s + EXTRA_DRAIN_S
        for child in children:
            if not child.wait(max(until - time.monotonic(), 0.1)):
                self._screen.say(f"{child.name} does not end: killing it", "yellow")
                child.kill()
                child.wait(5)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._handle_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stop.is_set():
            self._leave_at_once()
        self._stop.set()
        # Not through the console: its lock may be held by the code that was interrupted.
        os.write(2, b"\nending: running jobs are finished or given back (Ctrl-C again to leave at once)\n")

    def _leave_at_once(self) -> NoReturn:
        # No locks, no waiting: this interrupts code that may hold or do either. Redis ends by itself.
        victims = [(child.pid, signal.SIGKILL) for child in self._children]
        victims += [(self._redis.pid if self._redis else None, signal.SIGTERM)]
        for pid, signal_number in victims:
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.killpg(pid, signal_number)
        os._exit(130)

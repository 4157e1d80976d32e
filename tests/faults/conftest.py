"""Pools and answers as in the tests of the queue, and workers that are started again when they die."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


QUEUE_TOOLS = _load("queue_tools", Path(__file__).parents[1] / "queue" / "conftest.py")
FLEET = _load("fleet", Path(__file__).with_name("fleet.py"))


@pytest.fixture
def tools() -> ModuleType:
    return QUEUE_TOOLS


@pytest.fixture
def pool(redis_url: str) -> Iterator[Any]:
    pool = QUEUE_TOOLS.Pool(redis_url)
    yield pool
    pool.close()


class Keeper:
    """Keeps `count` workers running, as a supervisor does. `deaths` are exit statuses, in order."""

    def __init__(self, pool: Any, count: int, **options: Any) -> None:
        self._pool, self._options = pool, options
        self._running: list[subprocess.Popen[str]] = [pool.start(**options) for _ in range(count)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.deaths: list[int] = []
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            for worker in self._running:
                if (status := worker.poll()) is not None:
                    self.deaths.append(status)
                    self._running.remove(worker)
                    self._running.append(self._pool.start(wait=False, **self._options))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def keep(pool: Any) -> Iterator[Any]:
    keepers: list[Keeper] = []

    def start(count: int, **options: Any) -> Keeper:
        keepers.append(Keeper(pool, count, **options))
        return keepers[-1]

    yield start
    for keeper in keepers:
        keeper.close()


@pytest.fixture
def fleet(redis_servers: Callable[[str], Any], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Servers of a kind that `redis_servers` knows, all of which end with the test."""
    fleets: list[Any] = []

    def make(kind: str = "default") -> Any:
        fleets.append(FLEET.Fleet(redis_servers(kind).binary, tmp_path))
        return fleets[-1]

    yield make
    for each in fleets:
        each.close()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Any]:
    """Gateways and tasks processes, all of which end with the test."""
    services = FLEET.Services(tmp_path)
    yield services
    services.close()


@pytest.fixture
def hooks() -> Iterator[Any]:
    """An endpoint for webhooks."""
    with FLEET.Hooks() as hooks:
        yield hooks


@contextmanager
def _again_and_again(action: Callable[[], object], interval_s: float) -> Iterator[None]:
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(interval_s):
            action()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def again_and_again() -> Callable[..., AbstractContextManager[None]]:
    """`with again_and_again(action, interval_s)`: on a thread of its own, until the block ends."""
    return _again_and_again

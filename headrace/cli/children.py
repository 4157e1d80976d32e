"""A service as our child: its output shown under its name, its last words kept, its restarts counted."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from headrace.processes import describe_exit, kill_group, start_child

KEPT_LINES = 20
MAX_RESTARTS = 5
RESTART_WINDOW_S = 120.0
Show = Callable[[str, str], None]  # (name, line)


class Child:
    """One service. `env` is asked at each start: a worker that is started again gets a name of its own."""

    def __init__(
        self, name: str, command: Sequence[str], env: Callable[[], Mapping[str, str]], show: Show
    ) -> None:
        self.name = name
        self._command = command
        self._env = env
        self._show = show
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._kept: deque[str] = deque(maxlen=KEPT_LINES)
        self._restarts: deque[float] = deque()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Call from the main thread: the child lives as long as the thread that started it."""
        self._kept.clear()
        self._process = start_child(self._command, env=self._env(), output=subprocess.PIPE)
        if self._process.stdout is None:
            raise RuntimeError("the child has no output pipe")
        # A thread, so that a child never waits for us to read.
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """The exit status, or None while it runs or was never started."""
        return self._process.poll() if self._process else None

    def may_restart(self) -> bool:
        """Whether one more start is reasonable; counts it."""
        now = time.monotonic()
        while self._restarts and self._restarts[0] < now - RESTART_WINDOW_S:
            self._restarts.popleft()
        self._restarts.append(now)
        return len(self._restarts) <= MAX_RESTARTS

    def last_words(self) -> str:
        """How it ended and the last line that it wrote."""
        status = self.poll()
        if status is None:
            return f"{self.name} is running"
        if self._reader is not None:
            self._reader.join(2)
        last = next((line for line in reversed(self._kept) if line.strip()), "it wrote nothing")
        return f"{self.name} ended with {describe_exit(status)}: {last}"

    def terminate(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process is not None:
            kill_group(self._process)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, and all it wrote is shown."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._reader is not None:
            self._reader.join(2)
        return True

    def _read(self, output: IO[bytes]) -> None:
        with output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip()
                self._kept.append(line)
                self._show(self.name, line)


def python_module(module: str, *flags: str) -> list[str]:
    """The command of one of our services, in the Python that runs us."""
    return [sys.executable, "-u", "-m", module, *flags]

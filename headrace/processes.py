"""Child processes that never outlive us: own process group, and on Linux a signal when our process dies."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

_PR_SET_PDEATHSIG = 1


def start_child(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    output: IO[bytes] | int | None = None,
    pass_fds: Sequence[int] = (),
    when_we_die: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Starts `command` in its own process group, so that a terminal's Ctrl-C reaches us alone.

    Linux sends `when_we_die` when the *thread* that called ends: call it from the main thread.
    `output` takes stdout and stderr; None: ours. Raises OSError.
    """
    parent = os.getpid()
    # Loaded before the fork: afterwards only plain calls are safe.
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def tie_to_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(when_we_die))
            if os.getppid() != parent:  # died before the call
                os.kill(os.getpid(), when_we_die)

    return subprocess.Popen(
        command,
        env=None if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        pass_fds=pass_fds,
        process_group=0,
        preexec_fn=tie_to_parent,
    )


def stop_child(process: subprocess.Popen[bytes], *, timeout_s: float) -> int:
    """SIGTERM, and after `timeout_s` SIGKILL to the whole group. Returns the exit status."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            kill_group(process)
    return process.wait()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def describe_exit(status: int) -> str:
    """`exit status 1`, or the signal's name for a process that a signal ended."""
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"

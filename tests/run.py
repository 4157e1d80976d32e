"""Runs all tests: `python tests/run.py [what pytest takes]`. Most of them side by side, on all cores.

What needs the machine for itself comes after them, one by one; `conftest.py` says what that is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

MOST_PROCESSES = 5  # each holds the demo model at some time
INTERRUPTED, NOTHING_COLLECTED = 2, 5  # of pytest's exit statuses


def parts(arguments: Sequence[str]) -> list[list[str]]:
    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)) + 1)  # one of them waits for something
    side_by_side = ["-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"]
    return [[*side_by_side, *arguments, "--alone", "no"], [*arguments, "--alone", "yes"]]


def run(flags: Sequence[str]) -> int:
    """Ctrl-C reaches pytest as well: it says what it was at, and how it went so far."""
    process = subprocess.Popen([sys.executable, "-m", "pytest", *flags])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def worst(statuses: Sequence[int]) -> int:
    """The first that tells of something wrong. A part may have nothing to run, both may not."""
    ran = [status for status in statuses if status != NOTHING_COLLECTED]
    return next((status for status in ran if status), 0) if ran else NOTHING_COLLECTED


def main(arguments: Sequence[str]) -> int:
    statuses: list[int] = []
    for flags in parts(arguments):
        statuses.append(run(flags))
        if statuses[-1] in (INTERRUPTED, -signal.SIGINT):
            break
    return worst(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

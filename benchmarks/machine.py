"""What the machine is and what else it was doing. On Linux; elsewhere unknown."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Seconds of CPU time so far: of the whole machine, and of the benchmark's own processes."""

    at_s: float
    machine_s: float
    ours_s: float


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Cores in use between two readings."""

    ours: float
    others: float


def describe() -> dict[str, str | int]:
    """Processor, cores and the versions that matter, for the head of a result."""
    facts: dict[str, str | int] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "system": platform.platform(),
    }
    for package in ("headrace", "torch", "transformers", "redis"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "none"
    return facts


def read_cpu(pids: set[int]) -> CpuReading | None:
    """None where there is no /proc."""
    try:
        ticks = [int(x) for x in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return None
    hz = os.sysconf("SC_CLK_TCK")
    busy = sum(ticks) - ticks[3] - ticks[4] - ticks[7]  # idle, waiting for disks, taken by the host
    return CpuReading(time.perf_counter(), busy / hz, sum(process_cpu_s(pid) for pid in pids))


def process_cpu_s(pid: int) -> float:
    """CPU seconds of one process, all its threads; 0 when it is gone."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def thread_cpu_s(pid: int) -> dict[int, float]:
    """CPU seconds of each thread of a process. Not in ticks: many threads may each have less than one."""
    found = {}
    for stat in (_PROC / str(pid) / "task").glob("*/schedstat"):
        with suppress(OSError):
            found[int(stat.parent.name)] = int(stat.read_text().split()[0]) / 1e9
    return found


def cpu_use(before: CpuReading | None, after: CpuReading | None) -> CpuUse | None:
    if before is None or after is None:
        return None
    wall_s = after.at_s - before.at_s
    ours = (after.ours_s - before.ours_s) / wall_s
    return CpuUse(ours, max(0.0, (after.machine_s - before.machine_s) / wall_s - ours))


def _cpu_name() -> str:
    try:
        lines = (_PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")

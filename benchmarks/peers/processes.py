"""What a whole tree of processes uses. On Linux; elsewhere unknown."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def tree(roots: Iterable[int]) -> set[int]:
    """`roots` and all their descendants alive now."""
    children = _children()
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, ())
    return found


def peaks_mib(roots: Mapping[str, int]) -> dict[str, int]:
    """Peak resident size of each root's tree, MiB: pages shared by two processes count twice."""
    return {role: round(sum(_peak_kib(pid) for pid in tree({root})) / 1024) for role, root in roots.items()}


def end_rest(pids: Iterable[int]) -> None:
    """Ends at once those of `pids` that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = defaultdict(list)
    for folder in _PROC.glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children[parent].append(int(folder.name))
    return children


def _peak_kib(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def own_tree() -> set[int]:
    """This process with everything it has started."""
    return tree({os.getpid()})

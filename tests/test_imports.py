"""Who may import whom: the rules between the rooms, over the source and, where it counts, at run time."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "transformers"}
OURS = {"headrace", "worker", "gateway", "headrace_kernels"}
IO = {"redis", "asyncio", "socket", "subprocess", "threading", "requests", "httpx", "urllib", "time"}
PACKAGES = {"headrace": "headrace", "worker": "worker", "gateway": "gateway", "headrace_kernels": "kernels"}


@dataclass(frozen=True)
class Rule:
    """Modules of `room` import none of `forbidden`; those under a folder or of a name in `free` may."""

    room: str
    forbidden: set[str]
    free: set[str] = field(default_factory=set)

    def applies_to(self, module: str) -> bool:
        inside = module == self.room or module.startswith(self.room + ".")
        return inside and not any(module == name or module.startswith(name + ".") for name in self.free)


RULES = [
    Rule("headrace", {"worker", "gateway", "headrace_kernels", *HEAVY}),
    Rule("headrace", {"typer", "rich", "click"}, free={"headrace.cli"}),
    Rule("gateway", {"worker", "headrace_kernels", *HEAVY}),
    Rule("worker", {"gateway", "headrace.cli"}, free={"worker.__main__"}),
    Rule("worker.queue", {"headrace_kernels", "worker.model", *HEAVY}),
    Rule("worker.engine", {"headrace_kernels", "worker.queue", "worker.model", "worker.text", *HEAVY, *IO}),
    Rule("worker.text", {"torch", "redis", "asyncio", "worker.queue", "worker.model"}),
    Rule("worker.model", {"redis", "asyncio", "worker.queue", "worker.text"}),
    Rule("headrace_kernels", {"headrace", "worker", "gateway", "transformers"}),
]
# The two who know the engine thread: the service, and the program that puts the parts together.
KNOW_BOTH = {"worker.service", "worker.__main__", "worker.engine_thread"}


def imported_names(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Every module that `source` imports at run time, absolute, wherever in the file the import stands."""
    for node in _run_time_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _run_time_nodes(child)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def violations(module: str, imported: set[str]) -> list[str]:
    found = []
    for rule in RULES:
        if rule.applies_to(module):
            bad = {name for name in imported if any(_within(name, banned) for banned in rule.forbidden)}
            found += [f"{module} imports {name}" for name in sorted(bad)]
    if module not in KNOW_BOTH and "worker.engine_thread" in imported and "asyncio" in imported:
        found.append(f"{module} knows both the engine thread and asyncio")
    is_triton_backend = any("triton" in part for part in module.split("."))
    if module.startswith("headrace_kernels") and "triton" in imported and not is_triton_backend:
        found.append(f"{module} imports triton outside its backend")
    return found


def _within(name: str, banned: str) -> bool:
    return name == banned or name.startswith(banned + ".")


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        base = ROOT if folder == package else ROOT / folder
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_every_module_keeps_to_its_room() -> None:
    found, seen = [], set()
    for module, path in modules():
        seen.add(module.split(".")[0])
        imported = set(imported_names(path.read_text(), module, path.name == "__init__.py"))
        found += violations(module, imported)
    assert seen == OURS
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("headrace.client", "from worker.engine import engine"),
        ("headrace.client", "def f():\n    import torch.nn"),
        ("headrace.config", "import typer"),
        ("gateway.app", "from transformers import AutoTokenizer"),
        ("worker.queue.lease", "from ..model import loader"),
        ("worker.engine.scheduler", "import time"),
        ("worker.engine.scheduler", "from worker import queue"),
        ("worker.engine.scheduler", "from .. import text"),
        ("worker.queue.intake", "import asyncio\nfrom worker.engine_thread import EngineThread"),
        ("headrace_kernels.attention", "import triton"),
        ("headrace_kernels.attention", "from headrace import errors"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(module, set(imported_names(source, module)))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("headrace.cli.up", "import typer"),
        ("gateway.app", "import gatewayish\nfrom torchless import x"),
        ("worker.service", "import asyncio\nfrom worker.engine_thread import EngineThread"),
        ("headrace_kernels.attention.triton_backend", "import triton"),
        ("worker.engine.plan", "if TYPE_CHECKING:\n    import torch"),
    ],
)
def test_a_right_import_is_not(module: str, source: str) -> None:
    assert not violations(module, set(imported_names(source, module)))


def test_kernels_is_no_package_and_no_test_folder_is_one() -> None:
    # transformers finds a package called `kernels` by name and breaks on ours.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("headrace", HEAVY | {"worker", "gateway"}),
        ("gateway", HEAVY | {"worker"}),
        ("worker.engine", HEAVY | {"redis"}),
        ("worker.queue", HEAVY),
    ],
)
def test_nothing_heavy_comes_in_by_the_back_door(room: str, forbidden: set[str]) -> None:
    names = [name for name, _ in modules() if _within(name, room) and not name.endswith("__main__")]
    imports = "\n".join(f"import {name}" for name in names)
    report = f"import sys\n{imports}\nprint(*sorted(sys.modules.keys() & {forbidden!r}))"
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, cwd=ROOT, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""

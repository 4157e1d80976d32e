"""The two parts of the whole suite, and their order: what is quick to fail runs first."""

from __future__ import annotations

import os

import pytest

COST = {"redis": 1, "model": 2, "e2e": 3}
ALONE_ROOMS = {"faults"}  # when a lease runs out is part of what they show

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network is a mistake
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # others compute beside us; tests that need more say so


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "only what needs the machine for itself, or only what does not"
    parser.addoption("--alone", choices=("yes", "no"), help=help_text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if wanted := config.getoption("--alone"):
        others = [item for item in items if is_alone(item) != (wanted == "yes")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if is_alone(item) == (wanted == "yes")]
    items.sort(key=lambda item: max((COST.get(mark.name, 0) for mark in item.iter_markers()), default=0))


def is_alone(item: pytest.Item) -> bool:
    return item.path.parent.name in ALONE_ROOMS or item.get_closest_marker("alone") is not None

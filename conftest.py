"""Order of the whole suite: what is quick to fail runs first."""

from __future__ import annotations

import os

import pytest

COST = {"redis": 1, "model": 2, "e2e": 3}

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network is a mistake


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: max((COST.get(mark.name, 0) for mark in item.iter_markers()), default=0))

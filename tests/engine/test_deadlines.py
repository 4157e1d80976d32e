"""Deadlines of live requests come due in order; ended requests do not pile up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worker.engine.deadlines import SLACK, Deadlines
from worker.engine.request import Group

Make = Callable[..., Any]


def group(request_of: Make, order: int, deadline_s: float | None) -> Group:
    made = Group(request_of("a", deadline_s=deadline_s), 0.0, order)
    made.live.append(made)  # type: ignore[arg-type]
    return made


def test_due_in_order_and_only_while_live(request_of: Make) -> None:
    deadlines = Deadlines()
    groups = [group(request_of, i, t) for i, t in enumerate((3.0, 1.0, None, 2.0))]
    for each in groups:
        deadlines.add(each)
    groups[1].live.clear()
    assert deadlines.next_s() == 2.0
    assert deadlines.pop_due(1.9) is None
    assert deadlines.pop_due(5.0) is groups[3]
    assert deadlines.pop_due(5.0) is groups[0]
    assert deadlines.pop_due(5.0) is None


def test_ended_groups_are_forgotten(request_of: Make) -> None:
    deadlines = Deadlines()
    for i in range(10_000):
        each = group(request_of, i, 1e9 + i)
        deadlines.add(each)
        if i % 100:
            each.live.clear()
    assert len(deadlines) <= 2 * 100 + SLACK

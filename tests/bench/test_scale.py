"""A pool of simulated workers on a real Redis, small and short."""

import pytest

from benchmarks.serving import own_redis
from benchmarks.simulated_pool import fairness, run_pool

pytestmark = pytest.mark.redis


async def test_a_pool_does_its_work_and_tells_what_it_cost() -> None:
    with own_redis() as server:
        assert server.pid is not None
        run = await run_pool(server.url, server.pid, 2, slots=4, step_s=0.01, seconds=1.0)
    assert run.tokens_per_s > 50
    assert run.tally.ended > 0
    assert set(run.costs) == {"pick", "claim", "emit"}
    assert all(cost.calls > 0 and cost.call_us > 0 for cost in run.costs.values())
    assert run.costs["emit"].item_us < run.costs["emit"].call_us


async def test_a_tenant_who_came_late_gets_its_share() -> None:
    with own_redis() as server:
        assert 1.0 <= await fairness(server.url, 2) < 1.5

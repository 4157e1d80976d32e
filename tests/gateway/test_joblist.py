"""Listing jobs, and where a queued one stands."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.waiting import Queues

pytestmark = pytest.mark.redis


async def submitted(http: httpx.AsyncClient, **fields: Any) -> str:
    answer = await http.post("/v1/jobs", json={"prompt": "x", "max_tokens": 3, **fields})
    return str(answer.json()["id"])


async def walked(http: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    """All pages."""
    found: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    for _ in range(100):
        page = (await http.get("/v1/jobs", params={**query, **after})).json()
        found += page["data"]
        if not page["has_more"]:
            assert page["next"] is None
            return found
        after = {"after": page["next"]}
    raise AssertionError("no last page")


async def test_by_tenant_status_and_class(http: httpx.AsyncClient, worker: Any) -> None:
    done = await submitted(http, tenant="alice")
    await http.get(f"/v1/jobs/{done}", params={"wait": 10})
    worker.gate.clear()
    others = [await submitted(http, tenant="bob", **{"class": name}) for name in ("high", "low")]
    everything = await walked(http)
    assert {job["id"] for job in everything} == {done, *others}
    assert all("result" not in job for job in everything)
    assert [job["id"] for job in await walked(http, tenant="alice")] == [done]
    assert [job["id"] for job in await walked(http, status="done")] == [done]
    assert [job["id"] for job in await walked(http, **{"class": "high"})] == [others[0]]
    assert await walked(http, tenant="alice", status="failed") == []
    (job,) = await walked(http, status="done")
    assert job["usage"]["completion_tokens"] == 3


async def test_pages_leave_out_nobody(http: httpx.AsyncClient, db: Any) -> None:
    ids = {await submitted(http) for _ in range(60)}
    await db.mset({f"someone-elses:{n}": n for n in range(500)})
    page = (await http.get("/v1/jobs", params={"limit": 7})).json()
    assert 7 <= len(page["data"]) < 60
    times = [job["t_submit"] for job in page["data"]]
    assert times == sorted(times, reverse=True)
    assert {job["id"] for job in await walked(http, limit=7)} == ids


@pytest.mark.parametrize(
    "query",
    [{"status": "odd"}, {"class": "odd"}, {"limit": 0}, {"limit": 501}, {"after": "x"}, {"after": "1.{}"}],
)
async def test_a_bad_query_names_its_field(http: httpx.AsyncClient, query: dict[str, Any]) -> None:
    answer = await http.get("/v1/jobs", params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))


async def test_a_tenants_key_lists_its_own(start_gateway: Any, http: httpx.AsyncClient) -> None:
    mine, _ = await submitted(http, tenant="alice"), await submitted(http, tenant="bob")
    locked = await start_gateway(api_keys=("alice:a",))
    async with httpx.AsyncClient(base_url=locked.url, headers={"Authorization": "Bearer a"}) as client:
        assert [job["id"] for job in await walked(client)] == [mine]
        assert (await client.get("/v1/jobs", params={"tenant": "bob"})).status_code == 403


async def test_where_a_queued_job_stands(http: httpx.AsyncClient, db: Any, kit: Any) -> None:
    normal = [await submitted(http) for _ in range(3)]
    high = await submitted(http, **{"class": "high"})
    keys = kit.Keys(kit.POOL)

    async def state(job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await http.get(f"/v1/jobs/{job_id}")).json()
        return found

    async def all_sorted() -> bool:
        return bool(await db.zcard(keys.ready("normal")) == 3 and await db.zcard(keys.ready("high")) == 1)

    await kit.eventually(all_sorted)
    states = [await state(job_id) for job_id in normal]
    assert [each["position"] for each in states] == [1, 2, 3]
    cost = states[1]["ahead_tokens"]
    assert [each["ahead_tokens"] for each in states] == [0, cost, 2 * cost]
    assert cost > 0
    assert [each.get("eta_ms") for each in states] == [0, None, None]  # nobody works here: no pace is known
    assert (await state(high))["position"] == 1
    await db.hset(keys.vtime, mapping={"pace:cost": cost * 100, "pace:ms": 10_000})  # one such job in 100 ms
    states = [await state(job_id) for job_id in normal]
    # A high one waits too and has the larger share; at the latest all four are done in 400 ms.
    assert [each["eta_ms"] for each in states] == [0, 400, 400]


async def test_a_job_that_runs_stands_nowhere(http: httpx.AsyncClient, worker: Any, kit: Any) -> None:
    job_id = await submitted(http)
    state = (await http.get(f"/v1/jobs/{job_id}", params={"wait": 10})).json()
    assert "position" not in state


def test_how_long_it_takes() -> None:
    queues = Queues({"high": 0, "normal": 4, "low": 2}, {"high": 0.0, "normal": 400.0, "low": 600.0}, 2.0)
    assert queues.cost_before("normal", 3) == 300
    assert queues.wait_ms("normal", 300) == pytest.approx(300 / (2.0 * 4 / 5))
    assert queues.wait_ms("low", 600) == pytest.approx(500)  # when all that waits has gone, at the latest
    assert queues.wait_ms("high", 0) == 0
    assert Queues(queues.counts, queues.costs, 0.0).wait_ms("low", 300) is None

"""Listing jobs, and where a queued one stands."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.directory import Pool
from gateway.waiting import Pace

pytestmark = pytest.mark.redis


async def submitted(http: httpx.AsyncClient, **fields: Any) -> str:
    answer = await http.post("/v1/jobs", json={"prompt": "x", "max_tokens": 3, **fields})
    return str(answer.json()["id"])


async def walked(http: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    """All pages."""
    found, after = [], {}
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

    async def position(job_id: str) -> tuple[int, int]:
        state = (await http.get(f"/v1/jobs/{job_id}")).json()
        assert "eta_ms" not in state  # nobody works here, so nobody knows
        return state["position"], state["ahead_tokens"]

    async def all_sorted() -> bool:
        return bool(await db.zcard(kit.Keys(kit.POOL).ready("normal")) == 3)

    await kit.eventually(all_sorted)
    assert await position(high) == (1, 0)
    assert [(await position(job_id))[0] for job_id in normal][-1] == 4
    assert (await position(normal[-1]))[1] == 3 * 256


async def test_a_job_that_runs_stands_nowhere(http: httpx.AsyncClient, worker: Any, kit: Any) -> None:
    job_id = await submitted(http)
    state = (await http.get(f"/v1/jobs/{job_id}", params={"wait": 10})).json()
    assert "position" not in state


def test_the_pace_of_a_pool() -> None:
    pace = Pace()

    def pool(**tokens: int) -> Pool:
        return Pool("p", {name: {"generated_tokens": str(count)} for name, count in tokens.items()})

    assert pace.read(pool(a=1000), 0.0) == 0.0
    assert pace.read(pool(a=1100, b=50), 2.0) == 50.0  # b is new: what it did before is not known
    assert pace.read(pool(a=1100, b=50), 100.0) == 50.0  # idle
    assert pace.read(pool(a=1200, b=50), 102.0) == 50.0
    assert pace.read(pool(a=10, b=250), 104.0) == pytest.approx(50 + 0.3 * 50)  # a has started again

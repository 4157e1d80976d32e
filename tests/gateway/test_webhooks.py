"""The audit list, replay and secrets over HTTP. Deliveries themselves are tested with the tasks process."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.tasks.deliveries import Deliveries

pytestmark = pytest.mark.redis


async def deliver(http: httpx.AsyncClient, db: Any, kit: Any, count: int = 1, **headers: str) -> None:
    body = {"prompt": "x", "max_tokens": 1, "webhook": "http://example.com/hook"}
    for _ in range(count):
        job = (await http.post("/v1/jobs", json=body, headers=headers)).json()["id"]
        await http.get(f"/v1/jobs/{job}", params={"wait": 10}, headers=headers)
    taken = 0
    deliveries = Deliveries(db, "smollm2", retention_ms=60_000)
    while taken < count:
        taken += await deliveries.take_notes()


async def test_list_look_up_and_replay(http: httpx.AsyncClient, db: Any, worker: Any, kit: Any) -> None:
    await deliver(http, db, kit, 3)
    listed = (await http.get("/v1/webhooks/deliveries", params={"limit": 2})).json()
    assert (len(listed["data"]), listed["has_more"]) == (2, True)
    first = listed["data"][0]
    assert (first["url"], first["status"]) == ("http://example.com/hook", "pending")
    one = (await http.get(f"/v1/webhooks/deliveries/{first['id']}")).json()
    assert one == first
    again = await http.post(f"/v1/webhooks/deliveries/{first['id']}/replay")
    assert (again.status_code, again.json()["replays"], again.json()["id"]) == (202, 1, first["id"])
    unknown = await http.get("/v1/webhooks/deliveries/msg_0")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
    ],
)
async def test_every_endpoint_takes_one(
    http: httpx.AsyncClient, db: Any, worker: Any, path: str, ask: dict[str, Any]
) -> None:
    answer = await http.post(path, json={**ask, "webhook": "http://example.com/hook"})
    assert answer.status_code == 200, answer.text
    deliveries = Deliveries(db, "smollm2", retention_ms=60_000)
    assert await deliveries.take_notes() == 1
    (told,) = (await http.get("/v1/webhooks/deliveries")).json()["data"]
    assert told["job"] == answer.headers["x-headrace-jobs"]
    refused = await http.post(path, json={**ask, "webhook": "example.com"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "webhook")


async def test_tenants_see_their_own(start_gateway: Any, db: Any, worker: Any, kit: Any) -> None:
    gateway = await start_gateway(api_keys=("a:key-a", "b:key-b"))
    keys = {name: {"Authorization": f"Bearer key-{name}"} for name in "ab"}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
        await deliver(http, db, kit, 1, **keys["a"])
        (mine,) = (await http.get("/v1/webhooks/deliveries", headers=keys["a"])).json()["data"]
        assert (await http.get("/v1/webhooks/deliveries", headers=keys["b"])).json()["data"] == []
        path = f"/v1/webhooks/deliveries/{mine['id']}"
        assert (await http.get(path, headers=keys["b"])).status_code == 404
        assert (await http.post(path + "/replay", headers=keys["b"])).status_code == 404
        secrets = [(await http.get("/v1/webhooks/secret", headers=keys[n])).json()["secret"] for n in "ab"]
        assert secrets[0] != secrets[1]
        assert all(secret.startswith("whsec_") for secret in secrets)

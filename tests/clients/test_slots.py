"""A client that leaves makes room for the next, at a worker that takes one job at a time."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.redis]
POOL = "one"


def test_leaving_makes_room(stack: Any, kit: Any) -> None:
    stack.spawn("worker", "--pool", POOL, "--model", "simulated:step_ms=5", "--max-num-seqs", "1")
    with httpx.Client(base_url=stack.url, timeout=30) as http:
        stack.eventually(lambda: http.get("/readyz").json()["pools"].get(POOL, {}).get("workers"), 60)
        asked = {**kit.ASK, "model": POOL, "max_tokens": 2000, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
            job_id = answer.headers["x-headrace-jobs"]
            said = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
            assert sum(1 for _, chunk in zip(range(5), said, strict=False) if chunk["choices"]) == 5
            waiting = http.post("/v1/jobs", json={"model": POOL, "prompt": "x", "max_tokens": 2}).json()["id"]
            assert http.get(f"/v1/jobs/{waiting}", params={"wait": 0.3}).json()["status"] == "queued"
            assert http.get(f"/v1/jobs/{job_id}").json()["status"] == "running"
        assert http.get(f"/v1/jobs/{waiting}", params={"wait": 10}).json()["status"] == "done"
        assert http.get(f"/v1/jobs/{job_id}").json()["status"] == "cancelled"

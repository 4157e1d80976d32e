"""The benchmark of retention, small: nothing is left but what a pool keeps while it lives."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.retention import measure, unowned
from headrace.connect import connect
from headrace.keys import Keys

pytestmark = pytest.mark.redis


async def test_what_jobs_leave_behind(redis_url: str) -> None:
    figures = await measure(redis_url, jobs=500, retention_ms=100)
    assert figures["jobs"] == 500
    assert figures["keys_without_owner_or_ttl"] == []
    kept = {name.rpartition("}:")[2].split(":")[0] for name in figures["keys_left"]}
    assert kept <= {"q", "vtime", "usage"}
    assert figures["growth"] < 1.2  # jobs that stay would be a multiple


async def test_a_key_nobody_removes_is_found(redis_url: str) -> None:
    redis: Any = connect(redis_url)
    await redis.set("hr:{retention}:job:forgotten", 1)
    await redis.set("hr:{retention}:log:expires", 1, px=60_000)
    assert await unowned(redis, Keys("retention")) == ["hr:{retention}:job:forgotten"]
    await redis.aclose()

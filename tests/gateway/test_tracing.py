"""The caller's trace goes into its jobs, traced here or not; nothing is traced unless told where to."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.tracing import start_tracing, valid_traceparent

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"


@pytest.mark.redis
@pytest.mark.parametrize(
    ("header", "field", "found"),
    [
        (PARENT, None, PARENT),
        (PARENT, OTHER, OTHER),  # what the job itself says goes first
        ("nonsense", None, None),
        (None, None, None),
    ],
)
async def test_the_callers_trace_goes_along(
    http: Any, worker: Any, header: str | None, field: str | None, found: str | None
) -> None:
    body = {"prompt": "x", "max_tokens": 1} | ({"traceparent": field} if field else {})
    headers = {"traceparent": header} if header else {}
    job = (await http.post("/v1/jobs", json=body, headers=headers)).json()
    await http.get(f"/v1/jobs/{job['id']}", params={"wait": 10})
    assert worker.seen[-1].traceparent == found


@pytest.mark.redis
async def test_one_request_is_not_anothers(http: Any, worker: Any) -> None:
    ask = {"prompt": "x", "max_tokens": 1}
    await http.post("/v1/completions", json=ask, headers={"traceparent": PARENT})
    await http.post("/v1/completions", json=ask)
    assert [job.traceparent for job in worker.seen] == [PARENT, None]


def test_off_unless_told_where_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert start_tracing("test") is None


@pytest.mark.parametrize(
    "text", [None, "", PARENT.upper(), PARENT + "x", "00-" + "0" * 32 + "-b7ad6b7169203331-01"]
)
def test_what_is_no_trace(text: str | None) -> None:
    assert valid_traceparent(text) is None
    assert valid_traceparent(PARENT) == PARENT

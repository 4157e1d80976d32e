"""A producer that knows only gateways: submits over HTTP, reads events over SSE, and resumes on any of them.

When its gateway dies in the middle of a stream it asks the next one for what comes behind the last event's
id, as a browser's EventSource does.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

import httpx
import msgspec

from headrace.client import JobState
from headrace.errors import ERRORS, HeadraceError
from headrace.messages import End, Event

BUSY_STATUSES = (408, 425, 429, 500, 502, 503, 504)
RETRY_S = 0.1
_EVENT = msgspec.json.Decoder(Event)


class AwayError(OSError):
    """No gateway took the request; it may be made again."""


class SseClient:
    """Submits, follows and polls as `headrace.client.Client` does. Use as an async context manager."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._turn = itertools.cycle(urls)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(20.0, connect=2.0))
        self.resumed = 0  # streams that broke and were gone on with

    async def __aenter__(self) -> SseClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def submit(self, *, job_id: str, **fields: Any) -> str:
        """Raises AwayError when it may be tried again: with the same id it is the same job."""
        answer = await self._ask("POST", "/v1/jobs", json={"id": job_id, **fields})
        return str(answer.json()["id"])

    async def poll(self, job_id: str) -> JobState | None:
        """Raises AwayError."""
        try:
            answer = await self._ask("GET", f"/v1/jobs/{job_id}")
        except HeadraceError as refusal:
            if refusal.code == "lost":
                return None
            raise
        known = {k: v for k, v in answer.json().items() if k in JobState.__struct_fields__}
        return msgspec.convert(known, JobState)

    async def follow(self, job_id: str) -> AsyncGenerator[Event, None]:
        """Every event once and in order, over as many connections as it takes. Raises HeadraceError."""
        last_seq = resumed_at = 0
        while True:
            with suppress(httpx.TransportError, AwayError):
                async with aclosing(self._stream(job_id, last_seq)) as events:
                    async for event in events:
                        last_seq = event.seq
                        yield event
                        if isinstance(event, End):
                            return
            self.resumed += last_seq > resumed_at
            resumed_at = last_seq
            await asyncio.sleep(RETRY_S)

    async def _stream(self, job_id: str, last_seq: int) -> AsyncGenerator[Event, None]:
        url = f"{next(self._turn)}/v1/jobs/{job_id}/events"
        headers = {"Last-Event-ID": str(last_seq)} if last_seq else {}
        async with self._http.stream("GET", url, headers=headers) as answer:
            if answer.status_code != 200:
                await answer.aread()
                _check(answer)
                raise AwayError("the stream has ended already")  # 204: it told its end to a dead connection
            async for kind, data in _parts(answer.aiter_lines()):
                if kind == "error":
                    _raise(msgspec.json.decode(data)["error"])
                yield _EVENT.decode(data)

    async def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = await self._http.request(method, next(self._turn) + path, **options)
        except httpx.TransportError as error:
            raise AwayError(type(error).__name__) from error
        _check(answer)
        return answer


async def _parts(lines: AsyncIterator[str]) -> AsyncGenerator[tuple[str, str], None]:
    """(event, data) of each whole SSE event; what a broken connection cut short is dropped."""
    kind, data = "message", ""
    async for line in lines:
        name, _, value = line.partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            data += value
        elif not line and data:
            yield kind, data
            kind, data = "message", ""


def _check(answer: httpx.Response) -> None:
    if answer.status_code < 300:
        return
    if answer.status_code in BUSY_STATUSES:
        raise AwayError(f"status {answer.status_code}")
    _raise(answer.json()["error"])


def _raise(error: dict[str, Any]) -> None:
    """A job that is not there any more, and a place behind the end of its log, are losses to a reader."""
    code = error["code"]
    if code == "unavailable":
        raise AwayError(error["message"])
    if code == "not_found" or error.get("param") in ("after", "Last-Event-ID"):
        code = "lost"
    raise HeadraceError(code if code in ERRORS else "internal", error["message"])

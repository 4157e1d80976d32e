"""Server-sent events: headers at once, heartbeats, and the moment the client leaves.

Nothing is buffered here: one chunk is asked of the source when the one before is on its way, and `send` waits
while the client's socket is full. The source does the bounding (see `headrace.follow`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from litestar import Response
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.errors import HttpError

T = TypeVar("T")
OPENING = b": headrace\n\n"
PING = b": ping\n\n"
LAGGING = b": lagging\n\n"
LAGGING_S = 1.0
WRITE_BYTES = 65_536
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
]


STOPPING = HttpError(503, "This gateway is being stopped; ask again, or go on at another.")
GOODBYE_S = 1.0


class ClientLeftError(Exception):
    """The client closed its connection before the answer was complete."""


def sse(data: bytes, *, event: str | None = None, event_id: int | None = None) -> bytes:
    """One event. `data` is JSON without line breaks."""
    head = b"" if event_id is None else b"id: %d\n" % event_id
    if event is not None:
        head += b"event: " + event.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def gathered(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in as few pieces as may be: each is one write to the client's socket."""
    pieces: list[bytes] = []
    size = 0
    for chunk in chunks:
        pieces.append(chunk)
        size += len(chunk)
        if size >= WRITE_BYTES:
            yield b"".join(pieces)
            pieces, size = [], 0
    if pieces:
        yield pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def client_left(receive: Receive) -> None:
    """Returns when the client has left. The request's body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_client_leaves(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Raises ClientLeftError, `STOPPING`."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(client_left(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    except asyncio.CancelledError:
        _cancelled_by_server()
        raise STOPPING from None
    finally:
        await _stop(gone, task)


class EventStream(Response[bytes]):
    """Streams `chunks`. Before their end `on_left` is called if the client leaves, and `on_stop`
    gives the last words if the gateway is stopped."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        heartbeat_s: float,
        on_left: Callable[[], None],
        on_stop: Callable[[], bytes],
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(b"", media_type="text/event-stream", headers=headers)
        self._chunks = chunks
        self._heartbeat_s = heartbeat_s
        self._on_left = on_left
        self._on_stop = on_stop
        self._quiet_since_s = time.monotonic()
        self._extra = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIApp:  # type: ignore[override]
        return self._serve

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(client_left(receive))
        complete = stopped = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS + self._extra})
            await send({"type": "http.response.body", "body": OPENING, "more_body": True})
            complete = await self._pump(send, gone)
            if complete:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            _cancelled_by_server()
            stopped = True
            with suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await send({"type": "http.response.body", "body": self._on_stop(), "more_body": False})
        finally:
            await _stop(gone)
            await self._chunks.aclose()
            if not complete and not stopped:
                self._on_left()

    async def _pump(self, send: Send, gone: asyncio.Future[None]) -> bool:
        """Sends until the source ends (True) or the client has left (False)."""
        forward = asyncio.ensure_future(self._forward(send))
        beat = asyncio.ensure_future(self._beat(send))
        try:
            await asyncio.wait({forward, gone}, return_when=asyncio.FIRST_COMPLETED)
            if forward.done():
                forward.result()
            return forward.done()
        finally:
            await _stop(beat, forward)

    async def _forward(self, send: Send) -> None:
        # No task and no timer for each chunk: there are as many as there are tokens.
        async for chunk in self._chunks:
            before_s = time.monotonic()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._quiet_since_s = time.monotonic()
            if self._quiet_since_s - before_s > LAGGING_S:
                # Its socket was full: the events meanwhile wait in the log, and it gets every one.
                await send({"type": "http.response.body", "body": LAGGING, "more_body": True})

    async def _beat(self, send: Send) -> None:
        while True:
            left_s = self._quiet_since_s + self._heartbeat_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await send({"type": "http.response.body", "body": PING, "more_body": True})
                self._quiet_since_s = time.monotonic()


async def _stop(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _cancelled_by_server() -> None:
    """A request's task is cancelled when the time for draining is over, and by nothing else."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()

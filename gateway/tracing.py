"""A request's spans, and its place in the caller's trace, which goes into every job it submits."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from headrace.tracing import Span, Tracing, valid_traceparent

_current: ContextVar[str | None] = ContextVar("headrace_traceparent", default=None)


def current_traceparent() -> str | None:
    """What the jobs of the request under way go under; None: nobody traces it."""
    return _current.get()


class TraceRequests:
    """ASGI middleware. The caller's trace is passed on even when nothing is traced here."""

    def __init__(self, app: ASGIApp, tracing: Tracing | None) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        traced = scope["type"] == "http" and scope["path"].startswith("/v1/")
        parent = _header(scope) if traced else None
        if not traced or self._tracing is None:
            token = _current.set(parent)
            try:
                await self._app(scope, receive, send)
            finally:
                _current.reset(token)
            return
        await self._traced(self._tracing, parent, scope, receive, send)

    async def _traced(
        self, tracing: Tracing, parent: str | None, scope: Any, receive: Receive, send: Send
    ) -> None:
        span = tracing.begin("headrace.request", parent, kind="server")
        answer = _Answer(tracing, span, send)
        token = _current.set(span.traceparent)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            _current.reset(token)
            route = scope.get("path_template") or "other"
            span.set({"http.request.method": scope["method"], "http.route": route})
            answer.end()


class _Answer:
    """Times what is sent: `stream` is from the first byte of an event stream to its last."""

    def __init__(self, tracing: Tracing, span: Span, send: Send) -> None:
        self._tracing = tracing
        self._span = span
        self._send = send
        self._status = 0
        self._streaming_since_s: float | None = None
        self._chunks = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if any(v.startswith(b"text/event-stream") for n, v in message["headers"] if n == b"content-type"):
                self._streaming_since_s = time.monotonic()
        elif message["type"] == "http.response.body":
            self._chunks += 1
        await self._send(message)

    def end(self) -> None:
        if self._streaming_since_s is not None:
            self._tracing.add(
                "headrace.stream",
                self._span.traceparent,
                self._streaming_since_s,
                time.monotonic(),
                {"headrace.chunks": self._chunks},
            )
        self._span.set({"http.response.status_code": self._status})
        self._span.end(failed=str(self._status) if self._status >= 500 else "")


def _header(scope: Any) -> str | None:
    for name, value in scope["headers"]:
        if name == b"traceparent":
            return valid_traceparent(value.decode("latin-1"))
    return None

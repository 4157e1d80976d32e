"""HTTP/1.1 with bounds: a request's head has a size, and a client that has begun one has to go on with it.

Both hold before anybody has shown a key, so that nobody can fill the memory or keep connections without one.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import HttpError, describe

MAX_HEAD_BYTES = 65_536
PATIENCE_S = 30.0  # for the whole head, then for each next piece of the body
_END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's own, which is given a head when it is complete. A response may take as long as it takes."""

    _stage = "head"  # of what the client sends; `idle` once a request is complete
    _head = b""
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait_for_client()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._stage == "body":
            super().data_received(data)
        elif head := self._whole_head(data):
            super().data_received(head)
        if self.transport.is_closing() or self._stage == "idle":
            self._stop_waiting()
        elif self._stage == "body" or self._patience is None:
            self._wait_for_client()

    def _whole_head(self, data: bytes) -> bytes:
        """Everything from the head's first byte on, once its last one is there; until then nothing."""
        self._unset_keepalive_if_required()
        self._stage = "head"
        searched = max(0, len(self._head) - len(_END))
        self._head += data
        end = self._head.find(_END, searched)
        if not self._head[:1].isalpha():
            end = len(self._head)  # TLS, or what else is no HTTP: refused at once
        if max(end, len(self._head) if end < 0 else 0) > MAX_HEAD_BYTES:
            self._refuse(431, "The head of the request is too large.")
        if end < 0 or self.transport.is_closing():
            return b""
        whole, self._head = self._head, b""
        return _without_upgrade(whole, end)

    def on_message_begin(self) -> None:
        self._stage = "head"
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stage = "body"
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stage = "idle"
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _unsupported_upgrade_warning(self) -> None:
        pass  # CONNECT: the app refuses it

    def _refuse(self, status: int, message: str) -> None:
        code = "too_large" if status == 431 else None
        body = msgspec.json.encode(describe(HttpError(status, message, code=code))[1])
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _wait_for_client(self) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(PATIENCE_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or (answering and self._stage == "head"):  # it is we who do not go on
            self._wait_for_client()
        else:
            self.transport.close()


def _without_upgrade(request: bytes, end: int) -> bytes:
    """Offers of HTTP/2, which Java's client makes each time, are declined by answering in HTTP/1.1. The
    parser would take the body for the other protocol's."""
    return _UPGRADE.sub(b"\r\nx-upgrade:", request[:end]) + request[end:]

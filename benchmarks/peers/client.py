"""A reader of /v1/completions streams that leaves the processor to the server it measures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from benchmarks.load import LoadError
from benchmarks.peers.work import Answer, PeerRequest

READ_BYTES = 65_536
TIMEOUT_S = 900.0


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


async def complete(url: str, extra: Mapping[str, Any], requests: Sequence[PeerRequest]) -> list[Answer]:
    """All of `requests`, each at its time; `extra` goes into every body. Raises LoadError, TimeoutError."""
    bodies = [msgspec.json.encode(_body(request, extra)) for request in requests]
    start = time.perf_counter()
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(_one(url, request, body, start))
            for request, body in zip(requests, bodies, strict=True)
        ]
    return [task.result() for task in running]


def _body(request: PeerRequest, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt": request.prompt_ids,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }


async def _one(url: str, request: PeerRequest, body: bytes, start: float) -> Answer:
    await asyncio.sleep(start + request.arrive_s - time.perf_counter())
    parts = urlsplit(url)
    submitted_s = time.perf_counter() - start
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        stream = EventStream(start)
        while not stream.done and (data := await reader.read(READ_BYTES)):
            stream.feed(data)
    finally:
        writer.close()
    return Answer(request.id, submitted_s, stream.token_s, time.perf_counter() - start, stream.tokens)


class EventStream:
    """One response as it arrives: when its tokens came, and how many the server says there were."""

    def __init__(self, start: float) -> None:
        self.token_s: list[float] = []
        self.tokens = 0
        self.done = False
        self._start = start
        self._body = b""
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Raises LoadError for anything but a stream of events."""
        self._parser.feed_data(data)
        status = self._parser.get_status_code()
        if self._body and status != 200:
            raise LoadError(f"status {status}: {self._body[:300].decode(errors='replace')}")
        *lines, self._body = self._body.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip())

    def on_body(self, body: bytes) -> None:
        self._body += body  # an error raised in here would lose its text

    def on_message_complete(self) -> None:
        self.done = True

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        chunk = self._decoder.decode(data)
        if chunk.error is not None:
            raise LoadError(f"the server answered {chunk.error}")
        if chunk.usage is not None:
            self.tokens = chunk.usage.completion_tokens
        # An event that closes the answer may come without a token.
        if chunk.choices and (chunk.choices[0].text or not chunk.choices[0].finish_reason):
            self.token_s.append(time.perf_counter() - self._start)

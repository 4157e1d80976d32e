"""A trace from the caller through gateway, queue, prefill, decode and stream, as a collector gets it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytestmark = [pytest.mark.e2e, pytest.mark.redis]

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SECRET = "hushhushhush"


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.raw = b""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.take(body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, body: bytes) -> None:
        self.raw += body
        request = service.ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class Processes:
    def __init__(self, redis_url: str, endpoint: str) -> None:
        self._env = {name: v for name, v in os.environ.items() if not name.startswith(("HEADRACE_", "OTEL_"))}
        self._env |= {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        self._env |= {"OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
        self._redis_url = redis_url
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, module: str, *flags: str) -> None:
        command = [sys.executable, "-m", module, "--redis-url", self._redis_url, *flags]
        self._running.append(subprocess.Popen(command, env=self._env, stderr=subprocess.DEVNULL))

    def stop(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGTERM)
        for process in self._running:
            process.wait(20)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def processes(redis_url: str, collector: Collector) -> Iterator[Processes]:
    processes = Processes(redis_url, collector.url)
    yield processes
    processes.stop()


def asked(url: str, **options: Any) -> httpx.Response:
    """Once gateway and worker are there."""
    end_s = time.monotonic() + 60
    while True:
        try:
            if any(pool["workers"] for pool in httpx.get(f"{url}/readyz").json()["pools"].values()):
                return httpx.post(f"{url}/v1/chat/completions", timeout=30, **options)
        except (httpx.TransportError, KeyError):
            pass
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_one_trace_from_the_caller_to_the_last_byte(
    processes: Processes, collector: Collector, redis_server: Any
) -> None:
    free_port = sys.modules[type(redis_server).__module__].free_port
    port = free_port()
    processes.start("worker", "--model", "simulated:step_ms=2")
    processes.start("gateway", "--port", str(port))
    ask = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 12, "stream": True}
    answer = asked(f"http://127.0.0.1:{port}", json=ask, headers={"traceparent": f"00-{TRACE}-{CALLER}-01"})
    assert answer.text.endswith("data: [DONE]\n\n")
    processes.stop()  # what has not been sent is sent now
    spans = {span.name: span for span in collector.spans if span.trace_id.hex() == TRACE}
    assert set(spans) == {
        f"headrace.{name}" for name in ("request", "stream", "job", "queue", "prefill", "decode")
    }
    parents = {name: span.parent_span_id.hex() for name, span in spans.items()}
    assert parents["headrace.request"] == CALLER
    assert parents["headrace.stream"] == parents["headrace.job"] == spans["headrace.request"].span_id.hex()
    inner = [spans[f"headrace.{name}"] for name in ("queue", "prefill", "decode")]
    assert {span.parent_span_id for span in inner} == {spans["headrace.job"].span_id}
    for before, after in itertools.pairwise(inner):
        assert abs(before.end_time_unix_nano - after.start_time_unix_nano) < 20e6
    job = {each.key: each.value for each in spans["headrace.job"].attributes}
    assert job["gen_ai.usage.output_tokens"].int_value == 12
    assert job["headrace.status"].string_value == "done"
    assert SECRET.encode() not in collector.raw

"""OpenTelemetry traces, sent only when an OTLP endpoint is set. They hold ids, times and counts, never text.

Spans are made when they are over, from their two times: what runs on other threads and in other processes
needs no context that is carried along. Needs the `otel` extra.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

import structlog

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
Attributes = Mapping[str, str | int | float | bool]
log = structlog.get_logger("headrace.tracing")


class Tracing:
    """Makes spans. Cheap to call: they are gathered and sent by a thread of their own."""

    def __init__(self, service: str, exporter: Any = None) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or service})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        processor = BatchSpanProcessor(_otlp()) if exporter is None else SimpleSpanProcessor(exporter)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headrace")

    def begin(self, name: str, parent: str | None, *, kind: str = "internal") -> Span:
        """A span that starts now, under `parent`: a traceparent, or None for a trace of its own."""
        return self._start(name, parent, time.time_ns(), {}, kind)

    def add(
        self,
        name: str,
        parent: str | None,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        *,
        failed: str = "",
        kind: str = "internal",
    ) -> str:
        """A span that is over; times are those of `time.monotonic`. Returns its own traceparent."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._start(name, parent, offset_ns + round(start_s * 1e9), attributes, kind)
        span.end(failed=failed, at_ns=offset_ns + round(end_s * 1e9))
        return span.traceparent

    def open(self, name: str, parent: str | None, start_s: float, attributes: Attributes) -> Span:
        """A span that started at `start_s` and is not over."""
        start_ns = time.time_ns() - time.monotonic_ns() + round(start_s * 1e9)
        return self._start(name, parent, start_ns, attributes, "consumer")

    def close(self, timeout_s: float = 2.0) -> None:
        """Sends what is left, for as long as `timeout_s`."""
        self._provider.force_flush(round(timeout_s * 1000))
        self._provider.shutdown()

    def _start(self, name: str, parent: str | None, start_ns: int, attributes: Attributes, kind: str) -> Span:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {"traceparent": parent} if parent else {}
        context = TraceContextTextMapPropagator().extract(carrier)
        started = self._tracer.start_span(
            name, context, SpanKind[kind.upper()], attributes=attributes, start_time=start_ns
        )
        return Span(started)


class Span:
    """An open span. `traceparent` is what its children, also in other processes, go under."""

    def __init__(self, span: Any) -> None:
        self._span = span
        context = span.get_span_context()
        flags = int(context.trace_flags)
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, *, failed: str = "", at_ns: int | None = None) -> None:
        """`failed`: the error's code."""
        from opentelemetry.trace import StatusCode

        if failed:
            self._span.set_status(StatusCode.ERROR, failed)
        self._span.end(at_ns)


def start_tracing(service: str) -> Tracing | None:
    """None when no endpoint is set, or when what is needed is not installed, which is told."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        return Tracing(service)
    except ImportError as missing:
        log.warning("tracing_off", missing=missing.name, advice="pip install 'headrace[otel]'")
        return None


def valid_traceparent(text: str | None) -> str | None:
    """`text` if it is a W3C trace context."""
    return text if text is not None and TRACEPARENT.fullmatch(text) else None


def _otlp() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()

"""Logs on stderr: console lines for people or one JSON object a line, of our code and of libraries."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

from headrace.config import LogFormat, LogLevel

# They log at info what our own logs say better, or each HTTP request.
_QUIET = ("httpx", "httpcore", "uvicorn.access", "transformers", "huggingface_hub", "filelock", "asyncio")


def configure_logging(log_format: LogFormat, log_level: LogLevel) -> None:
    """Sets up structlog and the standard library's logging for the whole process."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(log_format, shared))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _formatter(log_format: LogFormat, shared: list[Processor]) -> logging.Formatter:
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if log_format == "json":
        # Plain tracebacks in both formats: those with local variables would show prompts.
        last: list[Processor] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        colors = sys.stderr.isatty()
        last = [
            structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
        ]
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[remove_meta, *last])

"""The shapes of OpenAI's Batch API."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar.dto import DTOConfig

from gateway.decoding import StrictDTO
from gateway.responses.schema import ResponseBody


class BatchRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


class BatchDTO(StrictDTO[BatchRequest]):
    config = DTOConfig(max_nested_depth=2)


class BatchError(msgspec.Struct, kw_only=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """Times are seconds since 1970."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Batch]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class InputLine(msgspec.Struct, kw_only=True):
    """One line of an input file."""

    custom_id: str
    url: str
    method: str = "POST"
    body: dict[str, Any]


class OpenJob(msgspec.Struct, frozen=True, kw_only=True):
    """A line whose job was submitted."""

    job: str
    pool: str
    custom_id: str
    model: str
    created_s: int
    num_choices: int = 1
    num_top: int | None = None
    response: ResponseBody | None = None  # of the Responses API, as it was before its job began

"""Failures on HTTP: OpenAI's error shape with the right status and one code, also inside a stream."""

from __future__ import annotations

from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException, InternalServerException
from litestar.openapi.datastructures import ResponseSpec
from redis.exceptions import RedisError

from headrace.errors import ERRORS, HeadraceError

RETRY_AFTER_S = "1"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    410: "gone",
    413: "too_large",
    415: "unsupported_media_type",
    503: "unavailable",
}
log = structlog.get_logger("headrace.gateway")


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is one of the job error codes, or one of HTTP's own: not_found, cancelled, unavailable, …"""

    message: str
    type: str
    param: str | None = None
    code: str
    retryable: bool = False


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail


ERROR_RESPONSES = {
    status: ResponseSpec(ErrorBody, description=text)
    for status, text in (
        (400, "The request is not valid; `param` names the field."),
        (401, "A valid API key is needed."),
        (404, "No pool serves this model."),
        (413, "The body is too large."),
        (429, "The queue is full."),
        (503, "The job store does not answer."),
    )
}
CLIENT_CLOSED_REQUEST = 499
_CUT_OFF = "client disconnected prematurely"  # how Litestar says that the body did not come to its end


class HttpError(Exception):
    """A refusal that only HTTP knows: a status and code outside the list of job errors."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or _CODES.get(status, "internal")
        self.param = param


def not_found(message: str, param: str | None = None) -> HttpError:
    return HttpError(404, message, param=param)


def error_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


def describe(exc: BaseException) -> tuple[int, ErrorBody]:
    """The HTTP status and the body for any exception. Unknown ones become `internal` without their text."""
    if isinstance(exc, HeadraceError):
        return _body(exc.spec.http_status, exc.code, exc.message, exc.field, exc.spec.retryable)
    if isinstance(exc, HttpError):
        return _body(exc.status, exc.code, exc.message, exc.param, exc.status == 503)
    if isinstance(exc, RedisError | OSError):
        return _body(503, "unavailable", "The job store does not answer; try again later.", None, True)
    if isinstance(exc, HTTPException) and exc.status_code < 500:
        return _body(
            exc.status_code, _CODES.get(exc.status_code, "invalid_request"), _detail(exc), _key(exc), False
        )
    return _body(500, "internal", ERRORS["internal"].message, None, True)


def job_error(error: dict[str, Any] | None, status: str) -> Exception:
    """The exception for a job that ended `failed` or `cancelled`."""
    if status == "cancelled" and not error:
        return HttpError(409, "The job was cancelled.", code="cancelled")
    code = str((error or {}).get("code", "internal"))
    if code not in ERRORS:
        return HttpError(500, str((error or {}).get("message", "The job failed.")), code=code)
    return HeadraceError(code, (error or {}).get("message"), (error or {}).get("field"))


def handle(request: Request[Any, Any, Any], exc: Exception) -> Response[ErrorBody | None]:
    """Litestar's exception handler: every failure of a request leaves through here."""
    if isinstance(exc, InternalServerException) and exc.detail == _CUT_OFF:
        return Response(
            None, status_code=CLIENT_CLOSED_REQUEST, media_type="application/json"
        )  # nobody reads it
    if isinstance(exc, HTTPException):
        exc = _explained(request, exc)
    status, body = describe(exc)
    request.app.state.metrics.count_error(body.error.code)
    if status >= 500 and status != 503:  # that Redis is away is told once, by the reaper
        _report(request, exc, status)
    headers = dict(getattr(exc, "headers", None) or {})
    # OpenAI's clients repeat what is answered by 409, 429 or 5xx unless told not to: poison, too.
    headers["x-should-retry"] = "true" if body.error.retryable else "false"
    if status in (429, 503):
        headers.setdefault("Retry-After", RETRY_AFTER_S)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def _explained(request: Request[Any, Any, Any], exc: HTTPException) -> HTTPException:
    """Says what Litestar leaves out: which address, which method, which limit."""
    asked = f"{request.method} {request.url.path[:200]}"
    if exc.status_code == 404:
        exc.detail = f"Nothing is served at {asked}; /schema/openapi.json lists what is."
    elif exc.status_code == 405:
        allowed = (exc.headers or {}).get("Allow", "other methods")
        exc.detail = f"{asked} is not served; allowed: {allowed}."
    elif exc.status_code == 413:
        exc.detail = (
            f"The body may have at most {request.route_handler.resolve_request_max_body_size()} bytes."
        )
    return exc


def _report(request: Request[Any, Any, Any], exc: Exception, status: int) -> None:
    # The text of an unexpected exception may quote the request, so only its type and place are logged.
    frame = exc.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    where = f"{frame.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.tb_lineno}" if frame else ""
    log.warning("request_failed", path=request.url.path, status=status, error=type(exc).__name__, at=where)


def _detail(exc: HTTPException) -> str:
    first = exc.extra[0] if isinstance(exc.extra, list) and exc.extra else None
    if not isinstance(first, dict) or first.get("key") == "data":
        return "A JSON object is needed as the body." if first else exc.detail
    return f"{first.get('key')}: {first.get('message')}"


def _key(exc: HTTPException) -> str | None:
    first = exc.extra[0] if isinstance(exc.extra, list) and exc.extra else None
    if not isinstance(first, dict) or first.get("key") == "data":
        return None
    return first.get("key")


def _body(status: int, code: str, message: str, param: str | None, retryable: bool) -> tuple[int, ErrorBody]:
    detail = ErrorDetail(
        message=message, type=error_type(status), param=param, code=code, retryable=retryable
    )
    return status, ErrorBody(error=detail)

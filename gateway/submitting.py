"""From checked values to a job ready to submit: pool, class, id, tenant, and how the job is to be treated."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request

from gateway.auth import tenant_of
from gateway.core import Gateway
from gateway.fields import Treated
from gateway.jobschema import JobRequest
from gateway.store import JobRef, NewJob, new_id
from headrace.errors import HeadraceError
from headrace.keys import valid_job_id
from headrace.messages import CLASSES, SamplingParams
from headrace.submission import Flat, Limits, Prompt, parse_entry, parse_request, submission_fields

EXTRAS = ("ttl_ms", "on_disconnect", "webhook", "traceparent", "strict_deadline")
MAX_KEY = 255


async def plan_job(
    gateway: Gateway, request: Request[Any, Any, Any], data: JobRequest, idem_key: str | None, body_hash: str
) -> NewJob:
    """Raises HeadraceError naming the field, `unknown_model`, RedisError."""
    if idem_key is not None and not (0 < len(idem_key) <= MAX_KEY and idem_key.isprintable()):
        raise HeadraceError("invalid_request", f"1 to {MAX_KEY} printable characters.", "Idempotency-Key")
    if data.id is not None and not valid_job_id(data.id):
        raise HeadraceError("invalid_request", "id must be 1 to 128 of A-Z a-z 0-9 . _ : -.", "id")
    prompt, params = parse_request("any", _values(data))
    pool = await gateway.route(data.pool or data.model or (data.body or {}).get("model"))
    job_id = data.id or new_id("job_")
    return new_job(
        request,
        data,
        JobRef(pool.name, job_id),
        prompt,
        params,
        idem_key=idem_key,
        body_hash=body_hash,
        id_known=data.id is not None,
    )


def new_job(
    request: Request[Any, Any, Any],
    data: Treated,
    ref: JobRef,
    prompt: Prompt,
    params: SamplingParams,
    **keys: Any,
) -> NewJob:
    return job_of(tenant_of(request, data.tenant), data, ref, prompt, params, **keys)


def job_of(
    tenant: str, data: Treated, ref: JobRef, prompt: Prompt, params: SamplingParams, **keys: Any
) -> NewJob:
    """For a tenant that is known, without a request. Raises HeadraceError naming the field."""
    job_class = data.job_class or "normal"
    if job_class not in CLASSES:
        raise HeadraceError("invalid_request", "class must be high, normal or low.", "class")
    extras = _extras(data, tenant)
    return NewJob(ref, job_class, {**submission_fields(prompt, params), **extras}, tenant, **keys)


def _values(data: JobRequest) -> dict[str, Any]:
    """Body and fields together, as a worker reads an entry: a field goes before the body's."""
    own = msgspec.to_builtins(data)
    body = own.pop("body", None)
    if body is None:
        return dict(own)
    if own.keys() & {"prompt", "messages", "prompt_token_ids"}:
        raise HeadraceError("invalid_request", "A prompt beside a body is one too many.", "body")
    return {**body, **own}


def _extras(data: Treated, tenant: str) -> Flat:
    given = {name: getattr(data, name, None) for name in EXTRAS}
    flat: Flat = {name: _flat(value) for name, value in given.items() if value is not None}
    if (meta := getattr(data, "meta", None)) is not None:
        flat["meta"] = msgspec.json.encode(meta).decode()
    checked = {name.encode(): str(value).encode() for name, value in {**flat, "tenant": tenant}.items()}
    parse_entry("pool", "normal", "0-0", {b"prompt": b"", **checked}, Limits())
    return flat


def _flat(value: Any) -> str | int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()

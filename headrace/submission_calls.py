"""The calls that take a job in, `submit` and `fork`: what is asked, keys and arguments, the reply. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from headrace.errors import HeadraceError, Overloaded
from headrace.keys import Keys, valid_job_id
from headrace.log import encode_fields
from headrace.messages import CLASSES, Event
from headrace.script_calls import Call, payload_hash
from headrace.script_types import Submitted

DAY_MS = 86_400_000
MAX_FIELDS = 1000

Value = bytes | str | int | float
Fields = Mapping[str, Value]


class ForkOptions(TypedDict, total=False):
    """Whose job it is, what the pool may hold (0: any), and how long the job may stay without an end."""

    tenant: str
    max_entries: int
    max_bytes: int
    job_ttl_ms: int


class SubmitOptions(ForkOptions, total=False):
    """Also: what makes two submissions one, and the time within which the job is to be done."""

    idem_key: str | None
    idem_ttl_ms: int
    body_hash: str  # "": one is made of the fields
    ttl_ms: int | None


DEFAULTS = SubmitOptions(
    tenant="default",
    max_entries=0,
    max_bytes=0,
    job_ttl_ms=7 * DAY_MS,
    idem_key=None,
    idem_ttl_ms=DAY_MS,
    body_hash="",
    ttl_ms=None,
)


def submit_call(
    keys: Keys, costs: Sequence[int], job_class: str, job_id: str, fields: Fields, options: SubmitOptions
) -> Call:
    """Raises HeadraceError `invalid_request` for what no pool would take."""
    if not valid_job_id(job_id) or len(fields) > MAX_FIELDS or job_class not in CLASSES:
        raise HeadraceError("invalid_request", "class, id or number of fields is not valid", "id")
    asked = DEFAULTS | options
    tenant, idem_key = asked["tenant"], asked["idem_key"]
    own = {"id": job_id, "tenant": tenant}
    body = asked["body_hash"] or payload_hash(_flat({**own, **fields, **own}))
    # Judged by the script, so not once more when the entry is sorted: that estimate may differ.
    kept = {name: value for name, value in fields.items() if name != "strict_deadline"}
    idem = keys.idem(tenant, idem_key) if idem_key else keys.idem("", "")
    call_keys = [*(keys.queue(c) for c in CLASSES), keys.job(job_id), idem, keys.log(job_id)]
    call_keys += [*(keys.ready(c) for c in CLASSES), keys.vtime]
    strict = int(fields.get("strict_deadline") in ("true", b"true", "1", b"1", 1))
    args: list[Any] = [job_class, job_id, body, asked["idem_ttl_ms"] if idem_key else 0]
    args += [asked["max_entries"], asked["max_bytes"], asked["job_ttl_ms"], tenant]
    args += [asked["ttl_ms"] or fields.get("ttl_ms") or 0, strict, *costs]
    return call_keys, [*args, *_flat({**own, **kept, **own})]


def fork_call(
    keys: Keys,
    job_class: str,
    job_id: str,
    fields: Fields,
    events: Sequence[Event],
    prompt_tokens: int,
    options: ForkOptions,
) -> Call:
    asked = DEFAULTS | options
    flat = ["id", job_id, "tenant", asked["tenant"], *_flat(fields)]
    said = [encode_fields(event) for event in events]
    body = payload_hash([*flat, *(value for each in said for value in each)])
    call_keys = [*(keys.queue(c) for c in CLASSES), keys.job(job_id), keys.log(job_id)]
    args: list[Any] = [job_class, job_id, body, asked["max_entries"], asked["max_bytes"]]
    args += [asked["job_ttl_ms"], asked["tenant"], fields.get("ttl_ms") or 0, prompt_tokens, len(said)]
    for each in said:
        args += [len(each), *each]
    return call_keys, [*args, *flat]


def read_submitted(reply: Sequence[bytes]) -> Submitted:
    """Raises HeadraceError and Overloaded as `Scripts.submit` says."""
    kind, found, entry = [*(part.decode() for part in reply), "", ""][:3]
    if kind == "conflict":
        raise HeadraceError("conflict", field=found)
    if kind == "overloaded":
        raise Overloaded(found, int(entry or 0))
    if kind == "cannot_meet_deadline":
        raise HeadraceError(kind, f"It would take about {found} ms, longer than ttl_ms.", "ttl_ms")
    return Submitted(found, entry, kind == "existing")


def _flat(fields: Fields) -> list[Value]:
    return [part for field in fields.items() for part in field]

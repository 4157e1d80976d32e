"""POST /v1/jobs/{id}/fork: a new job that goes on from another's first k tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from litestar import Request, Response, post
from litestar.dto import DTOConfig
from litestar.params import Body, PathParameter, QueryParameter

from gateway.core import Gateway, GatewayHere
from gateway.decoding import StrictDTO
from gateway.errors import ERROR_RESPONSES
from gateway.fields import Sampling
from gateway.jobs import find_job
from gateway.jobschema import JobState, job_state
from gateway.store import Found, JobRef, NewJob, new_id
from headrace.errors import HeadraceError
from headrace.keys import valid_job_id
from headrace.messages import Delta, Event, Result, SamplingParams
from headrace.params import parse_params
from headrace.submission import Limits, Prompt, parse_entry, submission_fields

MAX_FORK_TOKENS = 100_000


class ForkRequest(Sampling, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`tokens` of choice `choice` are taken over. Parameters that are not given are the first job's."""

    tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_FORK_TOKENS)]
    choice: Annotated[int, msgspec.Meta(ge=0, le=127)] = 0
    id: str | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None


# What draws a token may change at a fork. What turns tokens to text may not: the first k were said already.
CHANGES = (*Sampling.__struct_fields__, "max_tokens", "logit_bias")


class ForkDTO(StrictDTO[ForkRequest]):
    config = DTOConfig()


@post(
    "/jobs/{job_id:str}/fork",
    dto=ForkDTO,
    return_dto=None,
    status_code=202,
    tags=["Jobs"],
    summary="Go on differently from token k",
    responses=ERROR_RESPONSES,
)
async def fork_job(
    job_id: Annotated[str, PathParameter(description="The job to go on from; it is left as it is.")],
    data: Annotated[ForkRequest, Body(description="Where to leave its path, and how to go on.")],
    request: Request[Any, Any, Any],
    gateway: GatewayHere,
    pool: Annotated[str | None, QueryParameter(description="Look in this pool only.")] = None,
) -> Response[JobState]:
    """Its log begins with the tokens taken over, and `max_tokens` counts them. It has one choice."""
    if data.id is not None and not valid_job_id(data.id):
        raise HeadraceError("invalid_request", "id must be 1 to 128 of A-Z a-z 0-9 . _ : -.", "id")
    found = await find_job(gateway, request, job_id, pool)
    prompt, params = await _origin(gateway, found)
    params = _changed(params, data)
    log = await gateway.pulse.guard(gateway.store.log(found.ref))
    events = first_tokens(log, data.choice, data.tokens)
    ref = JobRef(found.ref.pool, data.id or new_id("job_"))
    job_class = found.fields.get("class") or "normal"
    job = NewJob(ref, job_class, submission_fields(prompt, params), found.tenant)
    await gateway.submit_fork(job, events, prompt_tokens=int(found.fields.get("prompt_tokens") or 0))
    fields = await gateway.pulse.guard(gateway.store.state(ref))
    return Response(job_state(ref, fields), status_code=202, headers={"Location": f"/v1/jobs/{ref.id}"})


def first_tokens(log: Sequence[Event], choice: int, num_tokens: int) -> list[Event]:
    """The events that said a choice's first tokens, as those of a job of its own. Raises HeadraceError."""
    events: list[Event] = []
    said = 0
    for event in log:
        if isinstance(event, Delta) and event.i == choice and event.ids and said < num_tokens:
            said += len(event.ids)
            events.append(Delta(seq=len(events) + 1, text=event.text, ids=event.ids, lp=event.lp))
    if said != num_tokens:
        short = said < num_tokens
        message = (
            f"Choice {choice} has said {said} tokens." if short else "Inside an event of several tokens."
        )
        raise HeadraceError("invalid_request", message, "tokens")
    return events


async def _origin(gateway: Gateway, found: Found) -> tuple[Prompt, SamplingParams]:
    """What the job was asked: from its result, or from its entry while it has none."""
    result = _result(found)
    if result is not None and result.params is not None and result.prompt_ids:
        return Prompt("prompt_token_ids", tuple(result.prompt_ids)), result.params
    entry = await gateway.pulse.guard(gateway.store.entry(found))
    if not entry:
        raise HeadraceError("invalid_request", "What this job was asked is not known any more.", "job_id")
    job = parse_entry(found.ref.pool, found.fields["class"], found.fields["entry"], entry, Limits())
    for field in ("messages", "prompt_token_ids", "prompt"):
        if (value := getattr(job, field)) is not None:
            return Prompt(field, value), job.params
    raise HeadraceError("internal")


def _result(found: Found) -> Result | None:
    try:
        return msgspec.json.decode(found.fields.get("result", ""), type=Result)
    except msgspec.MsgspecError:
        return None


def _changed(params: SamplingParams, data: ForkRequest) -> SamplingParams:
    """Raises HeadraceError naming the field."""
    given: dict[str, Any] = {name: getattr(data, name) for name in CHANGES}
    checked = parse_params(given)
    changes = {name: getattr(checked, name) for name, value in given.items() if value is not None}
    changed = msgspec.structs.replace(params, **changes, n=1, best_of=None, echo=False, prompt_logprobs=None)
    if changed.max_tokens is not None and changed.max_tokens <= data.tokens:
        raise HeadraceError("invalid_request", "Must be more than the tokens taken over.", "max_tokens")
    return changed

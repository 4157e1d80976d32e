"""Lines of a batch: an input line as a job, a job's end as a line of the output or the error file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.batches.schema import InputLine, OpenJob
from gateway.decoding import decode
from gateway.directory import Directory
from gateway.errors import describe, job_error
from gateway.openai.chat import ChatWriter
from gateway.openai.completions import TextWriter
from gateway.openai.requests import checked_values, completion_params, split_prompts
from gateway.openai.schema import ChatRequest, CompletionRequest
from gateway.openai.serve import Head, Writer, total
from gateway.responses.inputs import body_of, check_request, input_items, messages_of, parse_response
from gateway.responses.render import response_of
from gateway.responses.schema import ResponseRequest
from gateway.store import JobRef, NewJob
from gateway.submitting import job_of
from headrace.errors import HeadraceError
from headrace.messages import Result, SamplingParams, Usage
from headrace.submission import Prompt, parse_request

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES)
MAX_CUSTOM_ID = 512


def read_line(raw: bytes, endpoint: str) -> InputLine:
    """Raises HeadraceError."""
    line = decode(raw, InputLine)
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
        raise HeadraceError("invalid_request", f"1 to {MAX_CUSTOM_ID} characters.", "custom_id")
    if line.method != "POST":
        raise HeadraceError("invalid_request", "The method has to be POST.", "method")
    if line.url != endpoint:
        raise HeadraceError("invalid_request", f"The batch's endpoint is {endpoint}.", "url")
    return line


async def plan_line(
    line: InputLine, tenant: str, job_id: str, directory: Directory
) -> tuple[NewJob, OpenJob]:
    """The job of a line, of class `low` unless it says otherwise. Raises HeadraceError naming the field."""
    data, prompt, params = _read_body(line)
    if data.stream:
        raise HeadraceError("invalid_request", "A batch's answers cannot be streamed.", "stream")
    pool = await directory.route(data.model)
    treated = msgspec.structs.replace(data, job_class=data.job_class or "low", tenant=None)
    job = job_of(tenant, treated, JobRef(pool.name, job_id), prompt, params)
    model = data.model or pool.name
    of_responses = isinstance(data, ResponseRequest)
    opened = OpenJob(
        job=job_id,
        pool=pool.name,
        custom_id=line.custom_id,
        model=model,
        created_s=int(time.time()),
        num_choices=params.n,
        num_top=params.logprobs,
        response=body_of(data, params, f"resp_{job_id}", model) if of_responses else None,
    )
    return job, opened


def _read_body(line: InputLine) -> tuple[Any, Prompt, SamplingParams]:
    raw = msgspec.json.encode(line.body)
    if line.url == CHAT:
        chat = decode(raw, ChatRequest)
        return chat, *parse_request("chat", checked_values(chat))
    if line.url == COMPLETIONS:
        completion = decode(raw, CompletionRequest)
        return completion, *_completion(completion)
    response = decode(raw, ResponseRequest)
    return response, *_response(response)


def _response(data: ResponseRequest) -> tuple[Prompt, SamplingParams]:
    """Its answer is in the output file and nowhere else."""
    check_request(data)
    for name in ("background", "previous_response_id"):
        if getattr(data, name):
            raise HeadraceError("invalid_request", f"{name} is not supported in batches.", name)
    data.store = False
    system = [{"role": "system", "content": data.instructions}] if data.instructions else []
    return parse_response(data, [*system, *messages_of(input_items(data))])


def _completion(data: CompletionRequest) -> tuple[Prompt, SamplingParams]:
    prompts = split_prompts(data.prompt)
    if len(prompts) != 1:
        raise HeadraceError("invalid_request", "One prompt a line is supported.", "prompt")
    if data.echo:
        raise HeadraceError("invalid_request", "echo is not supported in batches.", "echo")
    values = {**checked_values(data), "prompt": prompts[0]}
    return completion_params(*parse_request("completion", values))


def answer_line(endpoint: str, job: OpenJob, fields: Mapping[str, str]) -> tuple[bool, bytes]:
    """Whether the job was done, and its line; of a job that is gone, that it was lost."""
    if fields.get("status") != "done":
        error = msgspec.json.decode(fields["error"]) if fields.get("error") else None
        status = fields.get("status") or "failed"
        exc = job_error(error or ({"code": "lost"} if "status" not in fields else None), status)
        return False, refused_line(job.job, job.custom_id, exc)
    if job.response is not None:
        return True, _line(job.job, job.custom_id, 200, response_of(job.response, fields))
    result = msgspec.json.decode(fields["result"], type=Result)
    usage = msgspec.json.decode(fields["usage"], type=Usage)
    head = Head(
        f"{_prefix(endpoint)}{job.job}", job.created_s, job.model, result.fingerprint, job.num_choices
    )
    writer: Writer = ChatWriter(head) if endpoint == CHAT else TextWriter(head, num_top=job.num_top)
    return True, _line(job.job, job.custom_id, 200, writer.whole([result], total([usage])))


def refused_line(job_id: str, custom_id: str, exc: Exception) -> bytes:
    status, body = describe(exc)
    return _line(job_id, custom_id, status, body)


def unrun_line(job_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Of a line whose batch ended before its job."""
    return _encoded(job_id, custom_id, None, {"code": code, "message": message})


def _line(job_id: str, custom_id: str, status: int, body: msgspec.Struct) -> bytes:
    return _encoded(job_id, custom_id, {"status_code": status, "request_id": job_id, "body": body}, None)


def _encoded(job_id: str, custom_id: str, response: Any, error: Any) -> bytes:
    line = {"id": f"batch_req_{job_id}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


def _prefix(endpoint: str) -> str:
    return "chatcmpl-" if endpoint == CHAT else "cmpl-"

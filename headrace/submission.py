"""From a queue entry or an OpenAI-shaped request to a checked job: the one place where fields are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

import msgspec

from headrace import PROTOCOL_VERSION
from headrace import fields as f
from headrace.errors import HeadraceError
from headrace.keys import valid_job_id
from headrace.messages import Job, JobClass, SamplingParams
from headrace.params import HIGHEST_ID, MAX_TOKENS, MAX_TOP_LOGPROBS, RULES, flat_params, parse_params

MAX_TTL_MS = 30 * 86_400_000
MAX_MESSAGES = 10_000
MAX_META_BYTES = 16_384
MAX_URL = 2048
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
_TENANT = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,200})?")
_ON_DISCONNECT = re.compile(r"continue|cancel|cancel_after:[0-9]{1,6}(\.[0-9]{1,3})?")
_URL = re.compile(r"https?://[^\s/?#]+\S*")
_VERSION = re.compile(rb"[0-9]{1,9}")

PromptField = Literal["prompt", "messages", "prompt_token_ids"]
Flat = dict[str, bytes | str | int | float]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    max_body_bytes: int = 1_048_576  # of all the entry's values together


class Prompt(NamedTuple):
    """What is to be continued: the name of the one field that says it, and its checked value."""

    field: PromptField
    value: Any  # str, list[dict[str, Any]] or tuple[int, ...]


class NewerVersion(HeadraceError):
    """The entry is of a protocol version that this program does not speak; another worker may."""

    def __init__(self, version: str) -> None:
        right = f"{PROTOCOL_VERSION}, the version this pool speaks; it was {version}"
        super().__init__("invalid_request", f"v must be {right}.", "v")


def job_id_of(job_class: str, entry_id: str, fields: Mapping[bytes, bytes]) -> str:
    """The producer's own id if it is valid, else `<class>-<entry id>`."""
    own = fields.get(b"id", b"")[:129].decode("utf-8", "replace")
    return own if valid_job_id(own) else f"{job_class}-{entry_id}"


def parse_entry(
    pool: str, job_class: str, entry_id: str, fields: Mapping[bytes, bytes], limits: Limits
) -> Job:
    """Raises HeadraceError naming the field at fault; NewerVersion when another worker may know better."""
    _check_version(fields.get(b"v"))
    if sum(map(len, fields.values())) > limits.max_body_bytes:
        raise HeadraceError("too_large", f"The entry's values exceed {limits.max_body_bytes} bytes.", "body")
    if b"id" in fields and not valid_job_id(f.flat_text("id", fields[b"id"][:200])):
        f.refuse("id", "1 to 128 of A-Z a-z 0-9 . _ : -", fields[b"id"][:200])
    values = _values(fields)
    prompt, params = parse_request("any", values)
    return Job(
        id=job_id_of(job_class, entry_id, fields),
        pool=pool,
        job_class=cast(JobClass, job_class),
        entry_id=entry_id,
        model=None if values.get("model") is None else f.string(256)("model", values["model"]),
        params=params,
        **{prompt.field: prompt.value},
        **_extras(fields),
    )


def _check_version(raw: bytes | None) -> None:
    if raw is None:
        return
    if not _VERSION.fullmatch(raw) or int(raw) == 0:
        f.refuse("v", "the protocol's version, 1", raw)
    if int(raw) > PROTOCOL_VERSION:
        raise NewerVersion(str(int(raw)))


def _values(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Body and flat fields as JSON values; a flat field goes before the body's."""
    values: dict[str, Any] = _body(fields) if b"body" in fields else {}
    flat = [name for name in PROMPT_FIELDS if name.encode() in fields]
    if b"body" in fields and flat:
        f.refuse(flat[0], "left out when there is a body")
    for name in ("prompt", "model"):
        if name.encode() in fields:
            values[name] = f.flat_text(name, fields[name.encode()])
    for name in ("messages", "prompt_token_ids", "tools", "response_format"):
        if name.encode() in fields:
            values[name] = f.flat_json(name, fields[name.encode()])
    if b"tool_choice" in fields:
        values["tool_choice"] = f.flat_text("tool_choice", fields[b"tool_choice"])
    for name, rule in RULES.items():
        if name.encode() in fields:
            values[name] = rule.flat(name, fields[name.encode()])
            if name == "max_tokens":
                values.pop("max_completion_tokens", None)
    return values


def _body(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    content_type = fields.get(b"ct", b"application/json")
    if content_type == b"application/msgpack":
        body = _msgpack(fields[b"body"])
    elif content_type == b"application/json":
        body = f.flat_json("body", fields[b"body"])
    else:
        f.refuse("ct", "application/json or application/msgpack", content_type)
    if not isinstance(body, dict) or not all(isinstance(name, str) for name in body):
        f.refuse("body", "an object", body)
    return body


def _msgpack(raw: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        f.refuse("body", f"valid MessagePack ({reason[:120]})")


def parse_request(
    kind: Literal["chat", "completion", "any"], obj: Mapping[str, Any]
) -> tuple[Prompt, SamplingParams]:
    """An OpenAI-shaped request as what is to be continued and how. Unknown names are ignored, None is absent.

    `chat` takes `messages`; `completion` takes `prompt` (a string or token ids) or `prompt_token_ids`; `any`
    takes one of them. max_tokens stays None when the request has none. Raises HeadraceError naming the field.
    """
    _refuse_unsupported(obj)
    prompt = _prompt(kind, obj)
    values = dict(obj)
    if (wanted := values.get("max_completion_tokens")) is not None:
        max_tokens = f.integer(1, MAX_TOKENS)("max_completion_tokens", wanted)
        if values.get("max_tokens") not in (None, max_tokens):
            f.refuse("max_completion_tokens", "left out, or equal to max_tokens", wanted)
        values["max_tokens"] = max_tokens
    if prompt.field == "messages" or isinstance(values.get("logprobs"), bool):
        values["logprobs"] = _chat_logprobs(values.get("logprobs"), values.get("top_logprobs"))
    if prompt.field == "messages" and values.get("echo"):
        f.refuse("echo", "left out: a chat has no echo")
    return prompt, parse_params(values)


def _refuse_unsupported(obj: Mapping[str, Any]) -> None:
    if obj.get("tools"):
        f.refuse("tools", "left out: tools are not supported yet")
    if obj.get("tool_choice") not in (None, "none"):
        f.refuse("tool_choice", '"none" or left out: tools are not supported yet')
    if obj.get("response_format") not in (None, {"type": "text"}):
        f.refuse("response_format", '{"type": "text"} or left out: grammars are not supported yet')


def _chat_logprobs(wanted: Any, top: Any) -> int | None:
    """OpenAI's chat says logprobs: true and top_logprobs: k; a number is taken as it is."""
    if wanted is not None and type(wanted) is int:
        return wanted
    if top is not None:
        f.integer(0, MAX_TOP_LOGPROBS)("top_logprobs", top)
    if wanted is None or not f.boolean("logprobs", wanted):
        if top:
            f.refuse("top_logprobs", "left out unless logprobs is true", top)
        return None
    return int(top or 0)


def _prompt(kind: str, obj: Mapping[str, Any]) -> Prompt:
    allowed = {"chat": ("messages",), "completion": ("prompt", "prompt_token_ids")}.get(kind, PROMPT_FIELDS)
    given = [name for name in allowed if obj.get(name) is not None]
    if len(given) != 1:
        names = " or ".join(allowed)
        raise HeadraceError(
            "invalid_request",
            f"Exactly one of {names} is needed" + (f", not {' and '.join(given)}." if given else "."),
            given[1] if given else allowed[0],
        )
    if given[0] == "messages":
        return Prompt("messages", _messages(obj["messages"]))
    if given[0] == "prompt_token_ids":
        return Prompt("prompt_token_ids", _token_ids("prompt_token_ids", obj["prompt_token_ids"]))
    return _text_or_ids(obj["prompt"])


def _text_or_ids(prompt: Any) -> Prompt:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Prompt("prompt", f.valid_text("prompt", prompt))
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        f.refuse("prompt", "a string or a list of token ids (one prompt a job)", prompt)
    return Prompt("prompt_token_ids", _token_ids("prompt", prompt))


def _token_ids(field: str, ids: Any) -> tuple[int, ...]:
    checked = f.integers(HIGHEST_ID, 0, HIGHEST_ID)(field, ids)
    if not checked:
        f.refuse(field, "at least one token id")
    return cast("tuple[int, ...]", checked)


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        f.refuse("messages", f"a list of 1 to {MAX_MESSAGES} messages", messages)
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(field: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        f.refuse(field, "an object with role and content", message)
    kept = {key: message[key] for key in MESSAGE_KEYS if message.get(key) is not None}
    f.string(64)(f"{field}.role", kept.get("role"))
    if "name" in kept:
        f.string(256)(f"{field}.name", kept["name"])
    for unsupported in ("tool_calls", "tool_call_id"):
        if unsupported in kept:
            f.refuse(f"{field}.{unsupported}", "left out: tools are not supported yet")
    kept["content"] = _content(f"{field}.content", kept.get("content"))
    return kept


def _content(field: str, content: Any) -> str:
    """A string, or a list of text parts, which are joined as they are."""
    if isinstance(content, str):
        return f.valid_text(field, content)
    if not isinstance(content, list):
        f.refuse(field, "a string or a list of text parts", content)
    return "".join(_part(f"{field}[{i}]", part) for i, part in enumerate(content))


def _part(field: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        f.refuse(field, 'a text part: {"type": "text", "text": "…"}', part)
    return f.valid_text(field, text)


def _extras(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    """What says how the job is treated and not what it says. Flat fields only."""
    extras: dict[str, Any] = {}
    if b"tenant" in fields:
        extras["tenant"] = _matching("tenant", fields, _TENANT, "1 to 64 of A-Z a-z 0-9 . _ @ -")
    if b"ttl_ms" in fields:
        extras["ttl_ms"] = f.integer(1, MAX_TTL_MS)("ttl_ms", f.flat_integer("ttl_ms", fields[b"ttl_ms"]))
    if b"webhook" in fields:
        extras["webhook"] = _matching("webhook", fields, _URL, "an http or https URL")
    if b"traceparent" in fields:
        trace = fields[b"traceparent"][:300].decode("ascii", "replace")
        extras["traceparent"] = trace if _TRACEPARENT.fullmatch(trace) else None  # tracing fails no job
    if b"meta" in fields:
        extras["meta"] = _meta(fields[b"meta"])
    if b"strict_deadline" in fields:
        extras["strict_deadline"] = f.flat_boolean("strict_deadline", fields[b"strict_deadline"])
    if b"on_disconnect" in fields:
        right = "continue, cancel or cancel_after:<seconds>"
        extras["on_disconnect"] = _matching("on_disconnect", fields, _ON_DISCONNECT, right)
    if b"priority_policy" in fields:
        extras["priority_policy"] = f.string(64)(
            "priority_policy", f.flat_text("priority_policy", fields[b"priority_policy"])
        )
    return extras


def _matching(field: str, fields: Mapping[bytes, bytes], pattern: re.Pattern[str], right: str) -> str:
    text = f.flat_text(field, fields[field.encode()])
    if len(text) > MAX_URL or not pattern.fullmatch(text):
        f.refuse(field, right, text)
    return text


def _meta(raw: bytes) -> msgspec.Raw:
    if len(raw) > MAX_META_BYTES:
        f.refuse("meta", f"at most {MAX_META_BYTES} bytes")
    f.flat_json("meta", raw)
    return msgspec.Raw(raw)


def submission_fields(prompt: Prompt, params: SamplingParams) -> Flat:
    """The flat fields that `parse_entry` reads back as the same prompt and parameters."""
    value = prompt.value if prompt.field == "prompt" else msgspec.json.encode(prompt.value)
    return {"v": PROTOCOL_VERSION, prompt.field: value, **flat_params(params)}

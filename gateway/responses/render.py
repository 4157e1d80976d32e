"""A response as its job's state makes it, and the typed events as the job's log makes them.

Both are functions of what Redis holds: any gateway gives the same events the same numbers, so that a stream
can be gone on with from any number at any gateway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import msgspec

from gateway.openai.logprobs import token_text
from gateway.responses.schema import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ResponseBody,
    ResponseError,
    ResponseUsage,
    TextLogprob,
    TextTop,
)
from gateway.stream import sse
from gateway.template import HOLE, Template
from headrace.messages import Delta, End, Event, Finish, Result, TokenLogprob, Usage

_RUNNING = {"queued": "queued", "running": "in_progress"}


def response_of(body: ResponseBody, fields: Mapping[str, str]) -> ResponseBody:
    """The response in the state of its job. No state: the job is gone with its result."""
    status = fields.get("status")
    if status in _RUNNING:
        return msgspec.structs.replace(body, status=_RUNNING[status])
    if status is None:
        return msgspec.structs.replace(
            body, status="failed", error=ResponseError(code="lost", message="The result is gone.")
        )
    result = msgspec.json.decode(fields["result"], type=Result) if fields.get("result") else None
    choice = result.choices[0] if result and result.choices else None
    error = msgspec.json.decode(fields["error"]) if fields.get("error") else None
    usage = msgspec.json.decode(fields["usage"], type=Usage) if fields.get("usage") else None
    return ended(
        body,
        status,
        choice.text if choice else "",
        logprobs(choice.lp if choice else None),
        choice.finish_reason if choice else None,
        usage,
        error,
        int(fields.get("t_end") or 0) // 1000,
    )


def ended(
    body: ResponseBody,
    status: str,
    text: str,
    lp: list[TextLogprob],
    reason: str | None,
    usage: Usage | None,
    error: Mapping[str, Any] | None,
    at_s: int | None = None,
) -> ResponseBody:
    shown = {"done": "incomplete" if reason == "length" else "completed"}.get(status, status)
    known = {"code": str((error or {}).get("code")), "message": str((error or {}).get("message"))}
    output = [message_of(body.id, text, lp, "completed" if shown == "completed" else "incomplete")]
    return msgspec.structs.replace(
        body,
        status=shown,
        completed_at=at_s if shown == "completed" else None,
        output=output if text or shown == "completed" else [],
        usage=usage_of(usage) if usage else None,
        error=ResponseError(**known) if shown == "failed" else None,
        incomplete_details=IncompleteDetails(reason="max_output_tokens") if shown == "incomplete" else None,
    )


def message_of(response_id: str, text: str, lp: list[TextLogprob], status: str) -> OutputMessage:
    content = [OutputText(text=text, logprobs=lp)]
    return OutputMessage(id=message_id(response_id), status=status, content=content)


def message_id(response_id: str) -> str:
    return "msg_" + response_id.removeprefix("resp_")


def usage_of(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=usage.total_tokens,
    )


def logprobs(tokens: Iterable[TokenLogprob] | None) -> list[TextLogprob]:
    return [
        TextLogprob(
            token=token_text(bytes(token.b)),
            logprob=token.lp,
            bytes=token.b,
            top_logprobs=[TextTop(token=token_text(bytes(t.b)), logprob=t.lp, bytes=t.b) for t in token.top],
        )
        for token in tokens or ()
    ]


class EventWriter:
    """Writes one response's events in order; those up to `after` are counted and not written."""

    def __init__(self, body: ResponseBody, after: int = -1) -> None:
        self._body = msgspec.structs.replace(
            body, output=[], usage=None, error=None, completed_at=None, incomplete_details=None
        )
        self._after = after
        self._number = 0
        self._text: list[str] = []
        self._logprobs: list[TextLogprob] = []
        self._reason: str | None = None
        self._begun = self._running = False

    def opening(self) -> Iterable[bytes]:
        """What can be said before the job has begun."""
        yield from self._whole(
            "response.created", self._at("queued" if self._body.background else "in_progress")
        )
        if self._body.background:
            yield from self._whole("response.queued", self._at("queued"))
        else:
            yield from self._run()

    def event(self, event: Event) -> Iterable[bytes]:
        if isinstance(event, End):
            yield from self._end(event)
            return
        yield from self._run()
        yield from self._begin()
        if isinstance(event, Delta):
            yield from self._delta(event)
        else:
            yield from self._finish(event)

    def terminal(self, body: ResponseBody) -> Iterable[bytes]:
        """The last event alone, numbered behind what the reader has: the log that had the others is gone."""
        self._number = self._after + 1
        yield from self._whole(_terminal_type(body.status), body)

    def error(self, code: str, message: str, param: str | None) -> bytes:
        """A failure of the stream itself; the response may go on."""
        self._number = max(self._number, self._after + 1)
        (chunk,) = self._write("error", code=code, message=message, param=param)
        return chunk

    @property
    def overtaken(self) -> int | None:
        """The last event's number, if the reader claims to have one behind it."""
        return self._number - 1 if self._after >= self._number else None

    def _run(self) -> Iterable[bytes]:
        if not self._running:
            self._running = True
            yield from self._whole("response.in_progress", self._at("in_progress"))

    def _begin(self) -> Iterable[bytes]:
        if not self._begun:
            self._begun = True
            item = OutputMessage(id=message_id(self._body.id), status="in_progress", content=[])
            yield from self._write("response.output_item.added", output_index=0, item=item)
            yield from self._part("response.content_part.added", part=OutputText())

    def _delta(self, event: Delta) -> Iterable[bytes]:
        self._text.append(event.text)
        if event.lp is None:
            if event.text:
                yield from self._text_delta(event.text)
            return
        lp = logprobs(event.lp)
        self._logprobs += lp
        if event.text or lp:
            yield from self._part("response.output_text.delta", delta=event.text, logprobs=lp)

    def _text_delta(self, text: str) -> Iterable[bytes]:
        number, self._number = self._number, self._number + 1
        if number > self._after:
            yield self._template.fill(number, text)

    @cached_property
    def _template(self) -> Template:
        fields = self._in_part(delta=HOLE, logprobs=[])
        return Template(self._event("response.output_text.delta", HOLE, fields))

    def _finish(self, event: Finish) -> Iterable[bytes]:
        self._reason = event.reason
        text, lp = "".join(self._text), self._logprobs
        yield from self._part("response.output_text.done", text=text, logprobs=lp)
        yield from self._part("response.content_part.done", part=OutputText(text=text, logprobs=lp))
        status = "incomplete" if event.reason == "length" else "completed"
        item = message_of(self._body.id, text, lp, status)
        yield from self._write("response.output_item.done", output_index=0, item=item)

    def _end(self, event: End) -> Iterable[bytes]:
        text = "".join(self._text)
        body = ended(self._body, event.status, text, self._logprobs, self._reason, event.usage, event.error)
        yield from self._whole(_terminal_type(body.status), body)

    def _at(self, status: str) -> ResponseBody:
        return msgspec.structs.replace(self._body, status=status)

    def _whole(self, kind: str, body: ResponseBody) -> Iterable[bytes]:
        return self._write(kind, response=body)

    def _part(self, kind: str, **fields: Any) -> Iterable[bytes]:
        return self._write(kind, **self._in_part(**fields))

    def _in_part(self, **fields: Any) -> dict[str, Any]:
        return {"item_id": message_id(self._body.id), "output_index": 0, "content_index": 0, **fields}

    def _write(self, kind: str, **fields: Any) -> list[bytes]:
        number, self._number = self._number, self._number + 1
        if number <= self._after:
            return []
        return [self._event(kind, number, fields)]

    def _event(self, kind: str, number: int, fields: dict[str, Any]) -> bytes:
        event = {"type": kind, "sequence_number": number, **fields}
        return sse(msgspec.json.encode(event), event=kind)


def _terminal_type(status: str) -> str:
    """There is no event for a cancelled response: `response.incomplete` says that it will not go on."""
    return f"response.{status if status in ('completed', 'failed') else 'incomplete'}"

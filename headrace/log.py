"""A job's log: events to flat stream fields and back, and reading it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

import msgspec
import redis.asyncio

from headrace.errors import HeadraceError
from headrace.keys import Keys
from headrace.messages import Delta, End, Event, Finish, TokenLogprob, Usage

PAGE = 500
FINISH_REASONS = ("stop", "length", "tool_calls")
STATUSES = ("done", "failed", "cancelled")

_encoder = msgspec.json.Encoder()
_ids = msgspec.json.Decoder(list[int])
_lp = msgspec.json.Decoder(list[TokenLogprob])
_prompt_lp = msgspec.json.Decoder(list[TokenLogprob | None])
_stop = msgspec.json.Decoder(str | int)
_usage = msgspec.json.Decoder(Usage)
_error = msgspec.json.Decoder(dict[str, Any])
_event: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Delta | Finish | End)


def encode_live(event: Event) -> bytes:
    """The event as one JSON object, as published on `live:<id>`."""
    return _encoder.encode(event)


def decode_live(data: bytes) -> Event:
    """Raises msgspec.DecodeError for anything that is no event."""
    return _event.decode(data)


def encode_fields(event: Event) -> list[bytes | str | int]:
    """The event as flat names and values of a log entry; its seq is the entry's id."""
    if isinstance(event, Delta):
        return _delta_fields(event)
    if isinstance(event, Finish):
        fields: list[bytes | str | int] = ["type", "finish", "i", event.i, "reason", event.reason]
        return fields if event.stop is None else [*fields, "stop", _encoder.encode(event.stop)]
    fields = ["type", "end", "status", event.status]
    if event.usage is not None:
        fields += ["usage", _encoder.encode(event.usage)]
    if event.error is not None:
        fields += ["error", _encoder.encode(event.error)]
    return fields


def _delta_fields(event: Delta) -> list[bytes | str | int]:
    fields: list[bytes | str | int] = ["type", "delta", "text", event.text, "ids", _encoder.encode(event.ids)]
    if event.i:
        fields += ["i", event.i]
    if event.cached:
        fields += ["cached", event.cached]
    if event.lp is not None:
        fields += ["lp", _encoder.encode(event.lp)]
    if event.prompt_lp is not None:
        fields += ["prompt_lp", _encoder.encode(event.prompt_lp)]
    return fields


def decode_fields(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Event:
    """The event of one log entry. Raises HeadraceError `lost` when it is none."""
    try:
        return _decode(int(entry_id.split(b"-")[0]), fields)
    except (KeyError, ValueError, msgspec.DecodeError) as error:
        raise HeadraceError("lost", f"Entry {entry_id!r} of the log is not an event.") from error


def _decode(seq: int, fields: Mapping[bytes, bytes]) -> Event:
    kind = fields[b"type"]
    if kind == b"delta":
        lp, prompt_lp = fields.get(b"lp"), fields.get(b"prompt_lp")
        return Delta(
            seq=seq,
            i=int(fields.get(b"i", b"0")),
            text=fields.get(b"text", b"").decode(),
            ids=_ids.decode(fields.get(b"ids", b"[]")),
            cached=int(fields.get(b"cached", b"0")),
            lp=None if lp is None else _lp.decode(lp),
            prompt_lp=None if prompt_lp is None else _prompt_lp.decode(prompt_lp),
        )
    if kind == b"finish":
        stop = fields.get(b"stop")
        return Finish(
            seq=seq,
            i=int(fields.get(b"i", b"0")),
            reason=cast(Literal["stop", "length", "tool_calls"], _one_of(fields[b"reason"], FINISH_REASONS)),
            stop=None if stop is None else _stop.decode(stop),
        )
    if kind != b"end":
        raise ValueError(f"type {kind!r}")
    usage, error = fields.get(b"usage"), fields.get(b"error")
    return End(
        seq=seq,
        status=cast(Literal["done", "failed", "cancelled"], _one_of(fields[b"status"], STATUSES)),
        usage=None if usage is None else _usage.decode(usage),
        error=None if error is None else _error.decode(error),
    )


def _one_of(value: bytes, allowed: tuple[str, ...]) -> str:
    text = value.decode()
    if text not in allowed:
        raise ValueError(text)
    return text


def decode_entries(entries: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> list[Event]:
    return [decode_fields(entry_id, fields) for entry_id, fields in entries]


async def read_page(redis_: redis.asyncio.Redis, keys: Keys, job_id: str, after_seq: int) -> list[Event]:
    """At most `PAGE` events after `after_seq`."""
    entries = await redis_.xrange(keys.log(job_id), min=f"{after_seq + 1}-0", max="+", count=PAGE)
    return decode_entries(entries)


async def read_log(redis_: redis.asyncio.Redis, keys: Keys, job_id: str, after_seq: int = 0) -> list[Event]:
    """All events after `after_seq`. Raises HeadraceError `lost` when one of them is no event."""
    events: list[Event] = []
    while True:
        page = await read_page(redis_, keys, job_id, events[-1].seq if events else after_seq)
        events += page
        if len(page) < PAGE:
            return events

"""Keys and arguments of each script, and its reply read back: pure, for the asyncio and the plain caller."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headrace.keys import Keys, this_month
from headrace.log import encode_fields, encode_live
from headrace.messages import CLASSES
from headrace.script_types import (
    Claimed,
    ClaimRow,
    EmitItem,
    EmitKind,
    EmitOutcome,
    Entry,
    Final,
    HeldRow,
    Picked,
    Renewed,
)

Call = tuple[list[str], list[Any]]
EMIT_KINDS: dict[int, EmitKind] = {
    ord("o"): "ok",
    ord("c"): "cancel",
    ord("s"): "stale",
    ord("g"): "gap",
    ord("l"): "lost",
    ord("e"): "error",
}


def payload_hash(values: Iterable[bytes | str | int | float]) -> str:
    """128 bits over the values, each with its length before it."""
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        data = value if isinstance(value, bytes) else str(value).encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def fixed_keys(keys: Keys) -> list[str]:
    return [
        *(keys.queue(c) for c in CLASSES),
        *(keys.ready(c) for c in CLASSES),
        keys.vtime,
        keys.leases,
        keys.deadlines,
        keys.ids,
        keys.hooks,
        keys.usage(this_month()),
        keys.suspects,
    ]


def read_picked(reply: Sequence[Any]) -> Picked:
    behind, waiting, bad, mode, *found = reply
    entries = [
        Entry(job_class.decode(), entry_id.decode(), _as_dict(fields), bool(gone))
        for job_class, entry_id, fields, gone in found
    ]
    last_ids = {c: last.decode() for c, last in zip(CLASSES, behind, strict=True)}
    unusable = [key.decode() for key in bad]
    return Picked(entries, last_ids, waiting, unusable, apart=mode == 1, on_duty=mode == 2)


def _as_dict(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """Of a name given twice the first value counts, as in the scripts."""
    return dict(reversed(list(zip(flat[::2], flat[1::2], strict=True))))


def claim_call(keys: Keys, head: list[Any], items: Sequence[ClaimRow]) -> Call:
    call_keys, args = [*fixed_keys(keys), keys.dead], list(head)
    for job_class, entry_id, job_id, ttl_ms in items:
        call_keys += [keys.job(job_id), keys.log(job_id), keys.live(job_id)]
        args += [job_class, entry_id, job_id, ttl_ms or 0]
    return call_keys, args


def read_claimed(items: Sequence[ClaimRow], reply: Sequence[Any]) -> list[Claimed]:
    return [
        Claimed(item[2], outcome.decode(), epoch, attempt, None if left < 0 else left, seq, submitted, waited)
        for item, (outcome, epoch, attempt, left, seq, submitted, waited) in zip(items, reply, strict=True)
    ]


def emit_call(keys: Keys, items: Sequence[EmitItem], retention_ms: int) -> Call:
    call_keys = [keys.leases, keys.deadlines, keys.ids, keys.undecodable, *(keys.queue(c) for c in CLASSES)]
    call_keys += (keys.hooks, keys.usage(this_month()), keys.vtime)
    args: list[Any] = [retention_ms]
    for item in items:
        job_id, final = item.job_id, item.final
        call_keys += (keys.job(job_id), keys.log(job_id), keys.live(job_id))
        mode = 0 if final is None else 2 if item.force else 1
        fence = f"{item.epoch} {item.job_class}-{item.entry_id}"
        args += (fence, item.prompt_tokens, mode, len(item.events))
        for event in item.events:
            fields = encode_fields(event)
            args += (event.seq, len(fields), encode_live(event), *fields)
        if final is not None:
            args += _final_args(final)
    return call_keys, args


def _final_args(final: Final) -> list[Any]:
    encode = msgspec.json.encode
    return [
        final.status,
        b"" if final.usage is None else encode(final.usage),
        b"" if final.result is None else encode(final.result),
        b"" if final.error is None else encode(final.error),
        int(final.undecodable),
    ]


def read_emitted(items: Sequence[EmitItem], reply: bytes) -> list[EmitOutcome]:
    return [_outcome(item, EMIT_KINDS[letter]) for item, letter in zip(items, reply, strict=True)]


def _outcome(item: EmitItem, kind: EmitKind) -> EmitOutcome:
    return EmitOutcome(item.job_id, kind, item.epoch, kind == "ok" and item.final is not None)


def renew_call(keys: Keys, held: Sequence[HeldRow], lease_ms: int) -> Call:
    call_keys, args = [keys.leases], list[Any]([lease_ms])
    for job_class, entry_id, job_id, epoch in held:
        call_keys.append(keys.job(job_id))
        args += [f"{job_class}-{entry_id}", epoch]
    return call_keys, args


def read_renewed(held: Sequence[HeldRow], reply: bytes) -> Renewed:
    renewed = Renewed()
    for item, letter in zip(held, reply, strict=True):
        if letter == ord("l"):
            renewed.lost.add(item[2])
        elif letter == ord("c"):
            renewed.cancelled.add(item[2])
    return renewed


def pardon_call(keys: Keys, worker: str, held: Sequence[HeldRow]) -> Call:
    call_keys, args = [keys.suspects], list[Any]([worker])
    for job_class, entry_id, job_id, epoch in held:
        call_keys.append(keys.job(job_id))
        args += [f"{job_class}-{entry_id}", epoch]
    return call_keys, args


def release_call(keys: Keys, worker: str, held: Sequence[HeldRow]) -> Call:
    call_keys = [*(keys.queue(c) for c in CLASSES), *(keys.ready(c) for c in CLASSES), keys.leases, keys.ctl]
    args: list[Any] = [worker]
    for job_class, entry_id, job_id, epoch in held:
        call_keys.append(keys.job(job_id))
        args += [job_class, entry_id, epoch]
    return call_keys, args

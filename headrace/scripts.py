"""Typed calls of the Lua scripts: each is one atomic change on the server, with every key declared.

Calls are made by SHA and fall back on the whole text by themselves after a SCRIPT FLUSH. None is repeated
here. After a lost reply `submit` and `fork` (the caller chose the id), `claim` (same nonce), `emit`, `renew`,
`cancel` and `reap` may be called again as they were; what a lost `pick` handed out comes back when its lease
ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError

from headrace.errors import HeadraceError, Overloaded
from headrace.keys import Keys, valid_job_id
from headrace.log import encode_fields
from headrace.lua_source import load_script
from headrace.messages import CLASSES, Event
from headrace.script_calls import (
    Call,
    claim_call,
    emit_call,
    fixed_keys,
    pardon_call,
    payload_hash,
    read_claimed,
    read_emitted,
    read_picked,
    read_renewed,
    release_call,
    renew_call,
)
from headrace.script_types import (
    CancelKind,
    Claimed,
    ClaimItem,
    ClaimRow,
    EmitItem,
    EmitOutcome,
    Entry,
    FairShare,
    Final,
    HeldJob,
    HeldRow,
    Picked,
    Reaped,
    Renewed,
    Submitted,
)

__all__ = [
    "CancelKind",
    "ClaimItem",
    "Claimed",
    "EmitItem",
    "EmitOutcome",
    "Entry",
    "FairShare",
    "Final",
    "HeldJob",
    "Picked",
    "Reaped",
    "Renewed",
    "Scripts",
    "Submitted",
    "SyncScripts",
]

HOUR_MS = 3_600_000
DAY_MS = 86_400_000
MAX_FIELDS = 1000
SCAN_COUNT = 1000


def _clearer(error: ResponseError) -> Exception:
    """Errors raised inside a script lose their class on the way; the server's state must stay visible."""
    text = str(error)
    for token, kind in (("OOM ", OutOfMemoryError), ("READONLY ", ReadOnlyError)):
        if token in text:
            return kind(text)
    return error


class Scripts:
    """The scripts of one pool over an asyncio client."""

    def __init__(self, redis: redis.asyncio.Redis, keys: Keys, share: FairShare | None = None) -> None:
        self._redis = redis
        self._keys = keys
        self._share = share or FairShare()
        self._scan_cursor = 0

    async def _run(self, name: str, call: Call) -> Any:
        script = load_script(name)
        keys, args = call
        try:
            try:
                return await self._redis.evalsha(script.sha, len(keys), *keys, *args)  # type: ignore[misc]
            except NoScriptError:
                return await self._redis.eval(script.text, len(keys), *keys, *args)  # type: ignore[misc]
        except ResponseError as error:
            raise _clearer(error) from error

    @property
    def _costs(self) -> tuple[int, int]:
        return self._share.output_weight, self._share.default_output

    async def submit(
        self,
        job_class: str,
        job_id: str,
        fields: Mapping[str, bytes | str | int | float],
        *,
        tenant: str = "default",
        idem_key: str | None = None,
        body_hash: str = "",
        idem_ttl_ms: int = DAY_MS,
        max_entries: int = 0,
        max_bytes: int = 0,
        job_ttl_ms: int = 7 * DAY_MS,
        ttl_ms: int | None = None,
    ) -> Submitted:
        """Takes a job in once: the same id (or key) with the same body is the same job.

        `fields` go into the entry as they are, with `id` and `tenant` set from the arguments; without a
        `body_hash` one is made of them. `max_entries` and `max_bytes` bound what the pool holds (0: any).
        Raises HeadraceError `conflict`, `overloaded` (with the time after which to try again),
        `cannot_meet_deadline` (only for a `strict_deadline`) or `invalid_request`.
        """
        if not valid_job_id(job_id) or len(fields) > MAX_FIELDS or job_class not in CLASSES:
            raise HeadraceError("invalid_request", "class, id or number of fields is not valid", "id")
        own = {"id": job_id, "tenant": tenant}
        body = body_hash or payload_hash(_flat({**own, **fields, **own}))
        # Judged by the script, so not once more when the entry is sorted: that estimate may differ.
        kept = {name: value for name, value in fields.items() if name != "strict_deadline"}
        flat = _flat({**own, **kept, **own})
        keys = self._keys
        idem = keys.idem(tenant, idem_key) if idem_key else keys.idem("", "")
        call_keys = [keys.queue(c) for c in CLASSES] + [keys.job(job_id), idem, keys.log(job_id)]
        call_keys += [*(keys.ready(c) for c in CLASSES), keys.vtime]
        deadline = ttl_ms or fields.get("ttl_ms") or 0
        strict = int(fields.get("strict_deadline") in ("true", b"true", "1", b"1", 1))
        args = [job_class, job_id, body, idem_ttl_ms if idem_key else 0, max_entries, max_bytes, job_ttl_ms]
        args += [tenant, deadline, strict, *self._costs]
        kind, found, entry = _texts(await self._run("submit", (call_keys, [*args, *flat])), width=3)
        if kind == "conflict":
            raise HeadraceError("conflict", field=found)
        if kind == "overloaded":
            raise Overloaded(found, int(entry))
        if kind == "cannot_meet_deadline":
            raise HeadraceError(kind, f"It would take about {found} ms, longer than ttl_ms.", "ttl_ms")
        return Submitted(found, entry, kind == "existing")

    async def fork(
        self,
        job_class: str,
        job_id: str,
        fields: Mapping[str, bytes | str | int | float],
        events: Sequence[Event],
        *,
        prompt_tokens: int,
        tenant: str = "default",
        max_entries: int = 0,
        max_bytes: int = 0,
        job_ttl_ms: int = 7 * DAY_MS,
    ) -> Submitted:
        """As `submit`, for a job whose log begins with `events` (seq 1, 2, …), the first of which it said."""
        flat: list[bytes | str | int | float] = ["id", job_id, "tenant", tenant]
        for name, value in fields.items():
            flat += [name, value]
        said = [encode_fields(event) for event in events]
        body = payload_hash([*flat, *(value for each in said for value in each)])
        keys = self._keys
        call_keys = [*(keys.queue(c) for c in CLASSES), keys.job(job_id), keys.log(job_id)]
        args: list[Any] = [job_class, job_id, body, max_entries, max_bytes, job_ttl_ms, tenant]
        args += [fields.get("ttl_ms") or 0, prompt_tokens, len(said)]
        for each in said:
            args += [len(each), *each]
        kind, found, entry = _texts(await self._run("fork", (call_keys, [*args, *flat])), width=3)
        if kind == "conflict":
            raise HeadraceError("conflict", field="id")
        if kind == "overloaded":
            raise Overloaded(found, 0)
        return Submitted(found, entry, kind == "existing")

    async def pick(
        self,
        worker: str,
        n: int,
        *,
        budget_tokens: int,
        lease_ms: int,
        sort_limit: int = 128,
        num_classes: int = len(CLASSES),
        holds_nothing: bool = True,
    ) -> Picked:
        """Sorts new entries (at most `sort_limit` of each class) and leases up to `n` to `worker`.

        A job is handed out while any of `budget_tokens` is left: the last one may exceed it. n=0 only sorts.
        Of the classes only the `num_classes` highest are handed out. What may have ended a worker is handed
        out apart, and only to one that `holds_nothing`.
        """
        args: list[Any] = [worker, n, budget_tokens, lease_ms, sort_limit, *self._costs]
        args += [self._share.output_reserve, num_classes, int(holds_nothing)]
        return read_picked(await self._run("pick", (fixed_keys(self._keys), args)))

    async def claim(
        self,
        worker: str,
        items: Sequence[ClaimRow],
        *,
        lease_ms: int,
        max_attempts: int,
        retention_ms: int = HOUR_MS,
        nonce: str | None = None,
    ) -> list[Claimed]:
        """Makes picked entries this worker's, in order. The same `nonce` again gives the same answer."""
        if not items:
            return []
        head = [worker, lease_ms, max_attempts, retention_ms, nonce or secrets.token_hex(8), *self._costs]
        reply = await self._run("claim", claim_call(self._keys, head, items))
        return read_claimed(items, reply)

    async def emit(self, items: Sequence[EmitItem], *, retention_ms: int = HOUR_MS) -> list[EmitOutcome]:
        """Writes one step of the whole batch, in order; at most one item a job. May be repeated as it was."""
        if not items:
            return []
        return read_emitted(items, await self._run("emit", emit_call(self._keys, items, retention_ms)))

    async def renew(self, worker: str, held: Sequence[HeldRow], *, lease_ms: int) -> Renewed:
        if not held:
            return Renewed()
        return read_renewed(held, await self._run("renew", renew_call(self._keys, held, lease_ms)))

    async def release(self, worker: str, held: Sequence[HeldRow]) -> int:
        """Gives jobs back to the front of the queue; everything emitted stays. Returns how many were ours."""
        return int(await self._run("release", release_call(self._keys, worker, held))) if held else 0

    async def pardon(self, worker: str, held: Sequence[HeldRow]) -> int:
        """Takes the blame from jobs whose worker lives after all. Returns how many deaths were struck out."""
        return int(await self._run("pardon", pardon_call(self._keys, worker, held))) if held else 0

    async def cancel(self, job_id: str, *, retention_ms: int = HOUR_MS) -> CancelKind:
        """Cancels: a waiting job ends here, a running one at its next step."""
        keys = self._keys
        call_keys = [*fixed_keys(keys), keys.ctl, keys.job(job_id), keys.log(job_id), keys.live(job_id)]
        reply: bytes = await self._run("cancel", (call_keys, [job_id, retention_ms, *self._costs]))
        return reply.decode()  # type: ignore[return-value]

    async def reap(
        self,
        *,
        retention_ms: int = HOUR_MS,
        consumer_idle_ms: int = HOUR_MS,
        stray_ttl_ms: int = HOUR_MS,
        limit: int = 100,
    ) -> Reaped:
        """Ends what is past its deadline and runs nowhere; sweeps what nobody owns. For any process."""
        await self.pick("reaper", 0, budget_tokens=0, lease_ms=1)
        due = await self._due(limit)
        doubtful, strays = await self._scanned()
        keys = self._keys
        call_keys = [*fixed_keys(keys), keys.workers]
        args: list[Any] = [
            retention_ms,
            consumer_idle_ms,
            stray_ttl_ms,
            *self._costs,
            len(due),
            len(doubtful),
        ]
        for job_class, entry_id, job_id in [*due, *doubtful]:
            call_keys += [keys.job(job_id), keys.log(job_id), keys.live(job_id)]
            args += [job_class, entry_id]
        return Reaped(*await self._run("reap", ([*call_keys, *strays], args)))

    async def overdue(self) -> bool:
        """Whether an entry is past its deadline: two quick commands, to be asked several times a second."""
        return bool(await self._due(1))

    async def _due(self, limit: int) -> list[tuple[str, str, str]]:
        """(class, entry id, job id) of entries past their deadline."""
        seconds, micros = await self._redis.time()
        now = seconds * 1000 + micros // 1000
        members = await self._redis.zrangebyscore(self._keys.deadlines, "-inf", now, start=0, num=limit)
        if not members:
            return []
        own = await self._redis.hmget(self._keys.ids, members)  # type: ignore[misc]
        found = []
        for member, own_id in zip(members, own, strict=True):
            job_class, _, entry_id = member.decode("utf-8", "replace").partition("-")
            job_id = (own_id or member).decode("utf-8", "replace")
            if job_class in CLASSES and valid_job_id(job_id):
                found.append((job_class, entry_id, job_id))
        return found

    async def _scanned(self) -> tuple[list[tuple[str, str, str]], list[str]]:
        """Of the next job hashes of a scan that goes round: those not ended, and those that are no job."""
        prefix, cursor = self._keys.job(""), self._scan_cursor
        self._scan_cursor, names = await self._redis.scan(cursor, match=f"{prefix}*", count=SCAN_COUNT)
        if not names:
            return [], []
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hmget(name, ["status", "class", "entry"])
            states = await pipeline.execute(raise_on_error=False)
        doubtful, strays = [], []
        for raw, state in zip(names, states, strict=True):
            name = raw.decode("utf-8", "replace")
            status, job_class, entry = ([b"?"] * 3) if isinstance(state, Exception) else state
            if status is None:
                strays.append(name)
            elif status in (b"queued", b"running") and job_class and entry and job_class.decode() in CLASSES:
                doubtful.append((job_class.decode(), entry.decode(), name.removeprefix(prefix)))
        return doubtful, strays


def _flat(fields: Mapping[str, bytes | str | int | float]) -> list[bytes | str | int | float]:
    return [part for field in fields.items() for part in field]


def _texts(reply: Sequence[bytes], width: int) -> list[str]:
    texts = [part.decode() for part in reply]
    return texts + [""] * (width - len(texts))


class SyncScripts:
    """`renew` over a synchronous client, for the thread that only keeps leases alive."""

    def __init__(self, redis: redis.Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    def renew(self, worker: str, held: Sequence[HeldRow], *, lease_ms: int) -> Renewed:
        if not held:
            return Renewed()
        keys, args = renew_call(self._keys, held, lease_ms)
        script = load_script("renew")
        reply: Any
        try:
            try:
                reply = self._redis.evalsha(script.sha, len(keys), *keys, *args)
            except NoScriptError:
                reply = self._redis.eval(script.text, len(keys), *keys, *args)
        except ResponseError as error:
            raise _clearer(error) from error
        return read_renewed(held, reply)

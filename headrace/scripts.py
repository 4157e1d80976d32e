"""Typed calls of the Lua scripts: each is one atomic change on the server, with every key declared.

Calls are made by SHA and fall back on the whole text by themselves after a SCRIPT FLUSH. None is repeated
here. After a lost reply `submit` and `fork` (the caller chose the id), `claim` (same nonce), `emit`, `renew`,
`cancel` and `reap` may be called again as they were; `pick` with what the worker knows it holds.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import redis
import redis.asyncio

from headrace import script_runner
from headrace.keys import Keys
from headrace.messages import CLASSES, Event
from headrace.script_calls import (
    Call,
    claim_call,
    emit_call,
    fixed_keys,
    pardon_call,
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
    ClaimRow,
    EmitItem,
    EmitOutcome,
    FairShare,
    HeldRow,
    Picked,
    Reaped,
    Renewed,
    Submitted,
)
from headrace.strays import JobScan, past_deadline
from headrace.submission_calls import (
    Fields,
    ForkOptions,
    SubmitOptions,
    fork_call,
    read_submitted,
    submit_call,
)

HOUR_MS = 3_600_000


class Scripts:
    """The scripts of one pool over an asyncio client."""

    def __init__(self, redis: redis.asyncio.Redis, keys: Keys, share: FairShare | None = None) -> None:
        self._redis = redis
        self._keys = keys
        self._share = share or FairShare()
        self._scan = JobScan(redis, keys)

    async def _run(self, name: str, call: Call) -> Any:
        return await script_runner.run(self._redis, name, call)

    @property
    def _costs(self) -> tuple[int, int]:
        return self._share.output_weight, self._share.default_output

    async def submit(
        self, job_class: str, job_id: str, fields: Fields, **options: Unpack[SubmitOptions]
    ) -> Submitted:
        """Takes a job in once: the same id (or `idem_key`) with the same body is the same job.

        `fields` go into the entry as they are, with `id` and `tenant` set from the arguments.
        Raises HeadraceError `conflict`, `overloaded` (with the time after which to try again),
        `cannot_meet_deadline` (only for a `strict_deadline`) or `invalid_request`.
        """
        call = submit_call(self._keys, self._costs, job_class, job_id, fields, options)
        return read_submitted(await self._run("submit", call))

    async def fork(
        self,
        job_class: str,
        job_id: str,
        fields: Fields,
        events: Sequence[Event],
        *,
        prompt_tokens: int,
        **options: Unpack[ForkOptions],
    ) -> Submitted:
        """As `submit`, for a job whose log begins with `events` (seq 1, 2, …), the first of which it said."""
        call = fork_call(self._keys, job_class, job_id, fields, events, prompt_tokens, options)
        return read_submitted(await self._run("fork", call))

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
        known: Iterable[str] | None = None,
    ) -> Picked:
        """Sorts new entries (at most `sort_limit` of each class) and leases up to `n` to `worker`.

        A job is handed out while any of `budget_tokens` is left: the last one may exceed it. n=0 only sorts.
        Of the classes only the `num_classes` highest are handed out. What may have ended a worker is handed
        out apart, and only to one that `holds_nothing`. After a lost reply, of a pick or a claim, `known` are
        the members that the worker knows it holds: what else is under its lease is handed out again.
        """
        args: list[Any] = [worker, n, budget_tokens, lease_ms, sort_limit, *self._costs]
        args += [self._share.output_reserve, num_classes, int(holds_nothing)]
        args += [0] if known is None else [1, *known]
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
        """Makes picked entries this worker's, in order. The same `nonce` again gives the same answer.

        What comes before a nonce's dot names the worker's life: it claims its own job again without a death.
        """
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
        due = await past_deadline(self._redis, self._keys, limit)
        scanned = await self._scan.next()
        keys = self._keys
        call_keys = [*fixed_keys(keys), keys.workers]
        args: list[Any] = [retention_ms, consumer_idle_ms, stray_ttl_ms, *self._costs]
        args += [len(due), len(scanned.doubtful)]
        for job_class, entry_id, job_id in [*due, *scanned.doubtful]:
            call_keys += [keys.job(job_id), keys.log(job_id), keys.live(job_id)]
            args += [job_class, entry_id]
        return Reaped(*await self._run("reap", ([*call_keys, *scanned.strays], args)))

    async def overdue(self) -> bool:
        """Whether an entry is past its deadline: two quick commands, to be asked several times a second."""
        return bool(await past_deadline(self._redis, self._keys, 1))


class SyncScripts:
    """`renew` over a synchronous client, for the thread that only keeps leases alive."""

    def __init__(self, redis: redis.Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    def renew(self, worker: str, held: Sequence[HeldRow], *, lease_ms: int) -> Renewed:
        if not held:
            return Renewed()
        call = renew_call(self._keys, held, lease_ms)
        return read_renewed(held, script_runner.run_sync(self._redis, "renew", call))

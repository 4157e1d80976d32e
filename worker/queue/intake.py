"""From a queue entry to a request the engine can run: parse, claim, tokenise, rebuild from the log."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import cast

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.errors import HeadraceError
from headrace.keys import Keys
from headrace.log import read_log
from headrace.messages import CLASSES, Event, Job, JobClass, SamplingParams
from headrace.script_types import Claimed, ClaimItem, Entry, HeldJob
from headrace.scripts import Scripts
from headrace.submission import Limits, NewerVersion, job_id_of, parse_entry
from worker.engine.request import Request
from worker.queue.best_of import BestOfJob
from worker.queue.job import RunningJob
from worker.queue.recovery import rebuild
from worker.text.codec import TextCodec
from worker.text.stream import TextStream

log = structlog.get_logger("headrace.intake")

CLAIM_RETRIES_S = READ_RETRIES_S = (0.05, 0.2, 0.5)
FIRST_PROBATION_TOKENS = 4  # doubled with each attempt: what crashes later is caught later
MAX_PROBATION_TOKENS = 4_096
INLINE_PROMPT_CHARS = 8_192  # longer ones are tokenised beside the event loop


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What intake needs to know of the loaded model."""

    name: str  # as clients call it
    aliases: frozenset[str]
    codec: TextCodec
    eos_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    kv_tokens: int  # of the whole KV cache
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """A claimed job ready to run. `request` is None when it ended on the way in and has only to be told."""

    held: HeldJob
    running: RunningJob
    request: Request | None
    claimed_at_s: float
    probation_tokens: int = 0  # to be said before anything else may run beside it


def seed_of(job_id: str) -> int:
    """The seed of a job that has none: the same on every worker, and after every restart."""
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "big") >> 1


def num_candidates(params: SamplingParams) -> int:
    return params.best_of or params.n


def _probation(claim: Claimed) -> int:
    return min(FIRST_PROBATION_TOKENS << min(claim.attempt, 16), MAX_PROBATION_TOKENS)


class Intake:
    """Claims what was picked and turns it into requests. Holds no job itself."""

    def __init__(
        self,
        redis: Redis,
        scripts: Scripts,
        keys: Keys,
        model: ServedModel,
        *,
        worker_id: str,
        lease_ms: int,
        max_attempts: int,
        retention_ms: int,
        default_max_tokens: int,
        limits: Limits,
    ) -> None:
        self._redis = redis
        self._scripts = scripts
        self._keys = keys
        self._model = model
        self._worker_id = worker_id
        self._lease_ms = lease_ms
        self._max_attempts = max_attempts
        self._retention_ms = retention_ms
        self._default_max_tokens = default_max_tokens
        self._limits = limits
        self._life = secrets.token_hex(8)
        self._claims = itertools.count()

    async def admit(self, entries: Sequence[Entry], *, apart: bool = False) -> list[Admitted]:
        """Claims `entries` in one call. One that cannot be read is claimed all the same, to be answered.

        `apart`: they are suspects, and on probation.
        """
        parsed = [self._parse(entry) for entry in entries]
        claimed_at_s = time.monotonic()
        items = [
            ClaimItem(e.job_class, e.entry_id, job.id, job.ttl_ms)
            for e, (job, _) in zip(entries, parsed, strict=True)
        ]
        claims = await self._claim(items)
        admitted = []
        for (job, error), claim in zip(parsed, claims, strict=True):
            if claim.outcome != "run":
                log.info("job_not_run", job=job.id, outcome=claim.outcome)
                continue
            try:
                one = await self._admit_one(job, error, claim, claimed_at_s)
            except (RedisError, OSError) as problem:  # its lease runs out, and somebody reads the log then
                log.warning("log_unread", job=job.id, error=type(problem).__name__)
                continue
            admitted.append(replace(one, probation_tokens=_probation(claim) if apart else 0))
        return admitted

    async def _claim(self, items: Sequence[ClaimItem]) -> list[Claimed]:
        """The same nonce in every try: a claim whose reply was lost is answered again, not made again."""
        nonce = f"{self._life}.{next(self._claims)}"
        for retry_s in CLAIM_RETRIES_S:
            with suppress(RedisConnectionError, RedisTimeoutError, OSError):
                return await self._claim_once(items, nonce)
            await asyncio.sleep(retry_s)
        return await self._claim_once(items, nonce)

    async def _claim_once(self, items: Sequence[ClaimItem], nonce: str) -> list[Claimed]:
        return await self._scripts.claim(
            self._worker_id,
            items,
            lease_ms=self._lease_ms,
            max_attempts=self._max_attempts,
            retention_ms=self._retention_ms,
            nonce=nonce,
        )

    def _parse(self, entry: Entry) -> tuple[Job, HeadraceError | None]:
        try:
            job = parse_entry(self._keys.pool, entry.job_class, entry.entry_id, entry.fields, self._limits)
            return job, None
        except HeadraceError as error:
            job_id = job_id_of(entry.job_class, entry.entry_id, entry.fields)
            unread = Job(
                id=job_id,
                pool=self._keys.pool,
                job_class=cast(JobClass, entry.job_class),
                entry_id=entry.entry_id,
                prompt="",
            )
            return unread, error

    async def _admit_one(
        self, job: Job, error: HeadraceError | None, claim: Claimed, claimed_at_s: float
    ) -> Admitted:
        held = HeldJob(job.job_class, job.entry_id, job.id, claim.epoch)
        prompt_ids: list[int] = []
        try:
            if error is not None:
                raise error
            self._check_model(job)
            prompt_ids = await self._encoded(job, claim)
            running = await self._rebuild(job, claim, prompt_ids)
            running.catch_up()
            request = None if running.ended else self._request(job, claim, running)
            return Admitted(held, running, request, claimed_at_s)
        except HeadraceError as refusal:
            log.info("job_refused", job=job.id, code=refusal.code, field=refusal.field)
            running = self._running(job, claim, prompt_ids)
            running.fail(refusal, undecodable=isinstance(refusal, NewerVersion) or refusal.field == "body")
            return Admitted(held, running, None, claimed_at_s)
        except (RedisError, OSError):
            raise
        except Exception:
            log.exception("intake_failed", job=job.id)
            running = self._running(job, claim, prompt_ids)
            running.fail(HeadraceError("internal"))
            return Admitted(held, running, None, claimed_at_s)

    def _check_model(self, job: Job) -> None:
        if job.model is None or job.model == self._model.name or job.model in self._model.aliases:
            return
        raise HeadraceError(
            "unknown_model", f"This pool serves {self._model.name!r}, not {job.model!r}.", "model"
        )

    async def _encoded(self, job: Job, claim: Claimed) -> list[int]:
        if job.messages is None and len(job.prompt or "") <= INLINE_PROMPT_CHARS:
            return self._encode(job, claim)
        return await asyncio.to_thread(self._encode, job, claim)

    def _encode(self, job: Job, claim: Claimed) -> list[int]:
        if job.prompt_token_ids is not None:
            return self._checked_ids(job.prompt_token_ids)
        if job.messages is not None:
            # The template may name the date: the job's own, so that every worker makes the same prompt of it.
            submitted = datetime.fromtimestamp(claim.submitted_ms / 1000, UTC)
            return self._model.codec.encode_chat(job.messages, now=submitted)
        return self._model.codec.encode_prompt(job.prompt or "")

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        for token_id in ids:
            if not 0 <= token_id < self._model.vocab_size:
                raise HeadraceError(
                    "invalid_request",
                    f"Token id {token_id} is outside the vocabulary (0 to {self._model.vocab_size - 1}).",
                    "prompt_token_ids",
                )
        return list(ids)

    async def _rebuild(self, job: Job, claim: Claimed, prompt_ids: list[int]) -> RunningJob:
        if claim.last_seq == 0:
            return self._running(job, claim, prompt_ids)
        events = await self._read_log(job.id)
        if len(events) != claim.last_seq:
            raise HeadraceError("lost", f"The log holds {len(events)} of {claim.last_seq} events.")
        return self._running(job, claim, prompt_ids, events=events)

    async def _read_log(self, job_id: str) -> list[Event]:
        for retry_s in READ_RETRIES_S:
            with suppress(RedisConnectionError, RedisTimeoutError, OSError):
                return await read_log(self._redis, self._keys, job_id)
            await asyncio.sleep(retry_s)
        return await read_log(self._redis, self._keys, job_id)

    def _running(
        self, job: Job, claim: Claimed, prompt_ids: list[int], events: Sequence[object] = ()
    ) -> RunningJob:
        state = rebuild(
            events,  # type: ignore[arg-type]
            num_candidates(job.params),
            lambda: TextStream(self._model.codec, prompt_ids, job.params),
        )
        kind = RunningJob if num_candidates(job.params) == job.params.n else BestOfJob
        return kind(
            job,
            epoch=claim.epoch,
            last_seq=claim.last_seq,
            codec=self._model.codec,
            prompt_ids=prompt_ids,
            choices=state.choices,
            seed=job.params.seed if job.params.seed is not None else seed_of(job.id),
            fingerprint=self._model.fingerprint,
            model_name=self._model.name,
            cached_tokens=state.cached_tokens,
            prompt_logprobs=state.prompt_logprobs,
        )

    def _request(self, job: Job, claim: Claimed, running: RunningJob) -> Request:
        now_s = time.monotonic()
        deadline_s = None if claim.left_ms is None else now_s + claim.left_ms / 1000
        return Request(
            request_id=job.id,
            prompt_ids=running.prompt_ids,
            params=self._resolved(job.params, len(running.prompt_ids)),
            seed=running.seed,
            priority=CLASSES.index(job.job_class),
            arrival_s=now_s - claim.waited_ms / 1000,
            deadline_s=deadline_s,
            salt=job.tenant,
            resumed=[list(c.ids) for c in running.choices],
            finished_choices=frozenset(c.index for c in running.choices if c.finished),
            eos_ids=self._model.eos_ids,
        )

    def _resolved(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        room = max(self._model.max_model_len - num_prompt_tokens, 0)
        wanted = params.max_tokens
        if wanted is None:  # nobody asked for more than the KV cache holds
            wanted = min(self._default_max_tokens, max(self._model.kv_tokens - num_prompt_tokens, 1))
        resolved = msgspec.structs.replace(params, max_tokens=min(wanted, room))
        if num_candidates(params) == params.n:
            return resolved
        scored = params.logprobs if params.logprobs is not None else 0
        return msgspec.structs.replace(resolved, n=params.best_of, best_of=None, logprobs=scored)

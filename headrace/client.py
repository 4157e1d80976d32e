"""The Python producer: submit, follow, poll, wait, cancel. Plain Redis commands do all of it too."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.connect import connect
from headrace.follow import Follower
from headrace.keys import Keys
from headrace.messages import ENDED, Event, Result, Status, Usage
from headrace.scripts import Scripts
from headrace.submission import Flat, parse_request, submission_fields

T = TypeVar("T")
ATTEMPTS = 4
RETRY_FIRST_S = 0.1


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """A job's hash. Times are ms of Redis's clock; 0 means not yet."""

    id: str
    status: Status
    seq: int = 0
    epoch: int = 0
    attempt: int = 0
    worker: str = ""
    cancel: bool = False
    t_submit: int = 0
    t_start: int = 0
    t_first: int = 0
    t_end: int = 0
    usage: Usage | None = None
    result: Result | None = None
    error: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED


_JSON_FIELDS = ("usage", "result", "error")
_NAMES = frozenset(JobState.__struct_fields__) - {"id"}


def decode_state(job_id: str, raw: Mapping[bytes, bytes]) -> JobState | None:
    """None: no such job (a cancel flag alone is none). Raises msgspec.ValidationError if it is damaged."""
    if b"status" not in raw:
        return None
    values: dict[str, Any] = {"id": job_id}
    for key, value in raw.items():
        name = key.decode("utf-8", "replace")
        if name in _JSON_FIELDS:
            values[name] = msgspec.json.decode(value)
        elif name in _NAMES:
            values[name] = value.decode("utf-8", "replace")
    return msgspec.convert(values, JobState, strict=False)


def new_job_id() -> str:
    """Sorts by time: milliseconds, then randomness."""
    return f"job-{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(8)}"


class Client:
    """A producer of one pool. Use as `async with Client(url, "smollm2") as client`.

    It chooses a job's id itself, so that a submission repeated after a lost reply is the same job.
    """

    def __init__(self, url: str, pool: str, *, max_connections: int = 16) -> None:
        self.keys = Keys(pool)
        self._redis = connect(url, max_connections=max_connections)
        self._scripts = Scripts(self._redis, self.keys)
        self._follower = Follower(url, redis=self._redis)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._follower.close()
        await self._redis.aclose()

    async def submit(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        job_class: str = "normal",
        job_id: str | None = None,
        tenant: str = "default",
        ttl_ms: int | None = None,
        idem_key: str | None = None,
        webhook: str | None = None,
        meta: Any = None,
        max_entries: int = 0,
        max_bytes: int = 0,
        **params: Any,
    ) -> str:
        """Checks and submits; the job's id. `params` are the protocol's sampling parameters, by name.

        Raises HeadraceError: `invalid_request` naming the field, `conflict` for an id or `idem_key` that
        another request has, `overloaded` when `max_entries` wait or run or take `max_bytes` (0: any);
        RedisError when Redis stays away.
        """
        request = {
            "prompt": prompt,
            "messages": None if messages is None else [dict(message) for message in messages],
            "prompt_token_ids": None if prompt_token_ids is None else list(prompt_token_ids),
            **{name: list(v) if isinstance(v, tuple) else v for name, v in params.items()},
        }
        fields = submission_fields(*parse_request("any", request))
        fields.update(_extras(ttl_ms, webhook, meta))
        chosen = job_id or new_job_id()
        submitted = await _retried(
            lambda: self._scripts.submit(
                job_class,
                chosen,
                fields,
                tenant=tenant,
                idem_key=idem_key,
                max_entries=max_entries,
                max_bytes=max_bytes,
            )
        )
        self._follower.know(self.keys, submitted.job_id)
        return submitted.job_id

    async def follow(self, job_id: str, after_seq: int = 0) -> AsyncGenerator[Event, None]:
        """Every event after `after_seq`, once and in order, up to the `End`. See `Follower.follow`."""
        async with aclosing(self._follower.follow(self.keys, job_id, after_seq)) as events:
            async for event in events:
                yield event

    async def poll(self, job_id: str) -> JobState | None:
        """The job's state; None when it is unknown, expired, or a plain XADD that no worker has read yet."""
        raw: Mapping[bytes, bytes] = await _retried(
            lambda: self._redis.hgetall(self.keys.job(job_id))  # type: ignore[arg-type, return-value]
        )
        return decode_state(job_id, raw)

    async def wait(self, job_id: str, timeout_s: float | None = None) -> JobState:
        """The state at the end. Raises TimeoutError; HeadraceError `lost` when the job is gone."""
        async with asyncio.timeout(timeout_s):
            state = await self.poll(job_id)
            while state is None or not state.ended:
                async with aclosing(self.follow(job_id, state.seq if state else 0)) as events:
                    async for _ in events:
                        pass
                state = await self.poll(job_id)
        return state

    async def cancel(self, job_id: str) -> bool:
        """Whether the job is or will be cancelled: False when it had ended already."""
        return await _retried(lambda: self._scripts.cancel(job_id)) != "over"


def _extras(ttl_ms: int | None, webhook: str | None, meta: Any) -> Flat:
    extras: Flat = {}
    if ttl_ms is not None:
        extras["ttl_ms"] = ttl_ms
    if webhook is not None:
        extras["webhook"] = webhook
    if meta is not None:
        extras["meta"] = msgspec.json.encode(meta)
    return extras


async def _retried(call: Callable[[], Awaitable[T]]) -> T:
    """Repeats what may be repeated when the connection failed or the reply did not come."""
    delay_s = RETRY_FIRST_S
    for _ in range(ATTEMPTS - 1):
        try:
            return await call()
        except (RedisConnectionError, RedisTimeoutError, OSError):
            await asyncio.sleep(delay_s)
            delay_s *= 2
    return await call()

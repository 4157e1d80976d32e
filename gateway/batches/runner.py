"""Takes batches on, a slice of time each: checks the file, keeps a window of jobs under way, writes answers.

All that is known of a batch is in Redis and each step is made once, so any process goes on where another
stopped, at whatever point that was: a job's id is that of its line, and submitting it again changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis

from gateway.batches.lines import answer_line, plan_line, read_line, refused_line, unrun_line
from gateway.batches.schema import BatchError, OpenJob
from gateway.batches.store import ENDED, Batches, Stored
from gateway.directory import Directory
from gateway.errors import HttpError
from gateway.filestore import FileObject, Files
from gateway.limits import Limits
from gateway.lua import redis_now_ms
from gateway.store import NewJob
from headrace.config import TasksSettings
from headrace.errors import HeadraceError
from headrace.keys import Keys
from headrace.messages import ENDED as JOB_ENDED
from headrace.scripts import Scripts

SLICE_S = 2.0  # short: a process that dies holds its batch for little more than this
PAUSE_S = 0.1
MAX_LINES = 50_000
MAX_ERRORS = 100
MAX_TOTAL_BYTES = 2**40  # what a batch was allowed to run is never dropped for want of room
WHY = {"expired": ("batch_expired", "The batch expired before this request was executed.")}
WHY["cancelled"] = ("batch_cancelled", "The batch was cancelled before this request was executed.")
log = structlog.get_logger("headrace.tasks")


class BatchRunner:
    """Raises RedisError; the batch is then due again later."""

    def __init__(self, redis: Redis, directory: Directory, limits: Limits, settings: TasksSettings) -> None:
        self._redis = redis
        self._directory = directory
        self._limits = limits
        self._settings = settings
        self._batches = Batches(redis)
        self._files = Files(redis)

    async def advance(self, batch_id: str) -> None:
        """Works on one batch for at most `SLICE_S`."""
        until_s = time.monotonic() + SLICE_S
        while time.monotonic() < until_s:
            batch = await self._batches.find(batch_id)
            if batch is None or batch.status in ENDED:
                await self._batches.drop_due(batch_id)
                return
            if not await self._step(batch, until_s):
                await asyncio.sleep(PAUSE_S)
        await self._batches.due_again(batch_id, await redis_now_ms(self._redis))

    async def _step(self, batch: Stored, until_s: float) -> bool:
        """Whether something happened, so that more may be done at once."""
        if batch.status == "validating":
            await self._validate(batch)
            return True
        if batch.status == "finalizing":
            await self._finish(batch, "completed")
            return True
        jobs = await self._batches.open_jobs(batch.id)
        answered = await self._collect(batch, jobs)
        if ending := await self._ending(batch):
            return await self._wind_up(batch, jobs, ending, until_s) or bool(answered)
        submitted = await self._submit_lines(batch, len(jobs) - answered)
        if not jobs and batch.number("line") >= batch.number("total"):
            await self._batches.move(batch, "finalizing")
            return True
        return bool(answered or submitted)

    async def _wind_up(self, batch: Stored, jobs: dict[int, OpenJob], ending: str, until_s: float) -> bool:
        """Stops what runs; what has been answered stays. Whether the batch has ended."""
        if jobs:
            await self._stop_jobs(jobs)
            return False
        if ending == "expired" and not await self._give_up_lines(batch, until_s):
            return False
        await self._finish(await self._batches.find(batch.id) or batch, ending)
        return True

    async def _ending(self, batch: Stored) -> str | None:
        if batch.status == "cancelling":
            return "cancelled"
        return "expired" if await redis_now_ms(self._redis) >= batch.number("expires") else None

    async def _validate(self, batch: Stored) -> None:
        errors, count, seen = [], 0, set()
        async for raw, _ in self._files.lines(batch.fields["input"]):
            count += 1
            try:
                custom_id = read_line(raw, batch.fields["endpoint"]).custom_id
                if custom_id in seen:
                    raise HeadraceError("invalid_request", "The custom_id is not unique.", "custom_id")
                seen.add(custom_id)
            except HeadraceError as exc:
                errors.append(BatchError(code=exc.code, message=exc.message, line=count, param=exc.field))
            if len(errors) >= MAX_ERRORS or count > MAX_LINES:
                break
        if count > MAX_LINES or not count:
            message = f"1 to {MAX_LINES} requests are needed."
            errors.append(BatchError(code="invalid_request", message=message))
        if errors:
            told = msgspec.json.encode(errors)
            moved = await self._batches.move(batch, "failed", errors=told)
        else:
            moved = await self._batches.move(batch, "in_progress", total=count, line=0, offset=0)
        if moved:
            log.info("batch", id=batch.id, status="failed" if errors else "in_progress", requests=count)

    async def _collect(self, batch: Stored, jobs: dict[int, OpenJob]) -> int:
        """Writes down the answers of jobs that have ended; how many."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for job in jobs.values():
                pipe.hget(Keys(job.pool).job(job.job), "status")
            states = await pipe.execute()
        count = 0
        for (line, job), state in zip(jobs.items(), states, strict=True):
            status = (state or b"").decode()
            if not status or status in JOB_ENDED:
                await self._write(batch, line, job)
                count += 1
        return count

    async def _write(self, batch: Stored, line: int, job: OpenJob) -> None:
        raw = await self._redis.hgetall(Keys(job.pool).job(job.job))  # type: ignore[misc]
        fields = {name.decode(): value.decode(errors="replace") for name, value in raw.items()}
        ending = await self._ending(batch)
        if ending and fields.get("status") == "cancelled":
            answer = unrun_line(job.job, job.custom_id, *WHY[ending])
            await self._batches.answered(batch, line, "failed", answer)
            return
        done, answer = answer_line(batch.fields["endpoint"], job, fields)
        await self._batches.answered(batch, line, "completed" if done else "failed", answer)

    async def _submit_lines(self, batch: Stored, under_way: int) -> int:
        """Fills the window; how many lines were gone on by."""
        first = line = batch.number("line")
        if line >= batch.number("total") or under_way >= self._settings.batch_window:
            return 0
        last = line + self._settings.batch_window - under_way
        async for raw, offset in self._files.lines(batch.fields["input"], batch.number("offset")):
            if line >= last or not await self._go_on(batch, line, offset, raw):
                return line - first
            line += 1
        if line < batch.number("total"):
            await self._batches.move(batch, "cancelling")  # the input was deleted before all of it was read
            log.warning("batch_input_gone", id=batch.id, line=line)
        return line - first

    async def _go_on(self, batch: Stored, line: int, offset: int, raw: bytes) -> bool:
        """By one line: its job is submitted, or it is refused. False: not now, or somebody else did it."""
        try:
            return await self._submit(batch, line, offset, raw)
        except HeadraceError as exc:
            if exc.spec.retryable:  # the queue is full, or the tenant's rate reached
                return False
            refusal: Exception = exc
        except HttpError as exc:
            if exc.status == 429:
                return False
            refusal = exc
        answer = refused_line(_job_id(batch, line), _custom_id(raw), refusal)
        return await self._batches.refused(batch, line, offset, answer)

    async def _submit(self, batch: Stored, line: int, offset: int, raw: bytes) -> bool:
        """Whether the batch went on by this line: False when another process did so meanwhile."""
        read = read_line(raw, batch.fields["endpoint"])
        job, opened = await plan_line(read, batch.tenant, _job_id(batch, line), self._directory)
        await self._limits.admit([job])
        await self._submit_job(job)
        return await self._batches.opened(batch, line, offset, opened)

    async def _submit_job(self, job: NewJob) -> None:
        await Scripts(self._redis, Keys(job.ref.pool)).submit(
            job.job_class,
            job.ref.id,
            job.fields,
            tenant=job.tenant,
            max_entries=self._settings.max_queue_entries,
            max_bytes=self._settings.max_queue_bytes,
        )

    async def _stop_jobs(self, jobs: dict[int, OpenJob]) -> None:
        for job in jobs.values():
            scripts = Scripts(self._redis, Keys(job.pool))
            await scripts.cancel(job.job, retention_ms=self._settings.retention_ms)

    async def _give_up_lines(self, batch: Stored, until_s: float) -> bool:
        """Says of each line that was never submitted why not. Whether that was all of them."""
        line = batch.number("line")
        if line >= batch.number("total"):
            return True
        async for raw, offset in self._files.lines(batch.fields["input"], batch.number("offset")):
            answer = unrun_line(_job_id(batch, line), _custom_id(raw), *WHY["expired"])
            if not await self._batches.refused(batch, line, offset, answer) or time.monotonic() > until_s:
                return False
            line += 1
        return True

    async def _finish(self, batch: Stored, status: str) -> None:
        """Makes the files known, then ends the batch: whoever sees its end finds them."""
        for name, file_id in (("output", batch.output_id), ("error", batch.error_id)):
            if num_bytes := batch.number(f"{name}_bytes"):
                await self._make_file(batch, file_id, f"{batch.id}_{name}.jsonl", num_bytes)
        if await self._batches.move(batch, status):
            counts = {name: batch.number(name) for name in ("total", "completed", "failed")}
            log.info("batch", id=batch.id, status=status, **counts)

    async def _make_file(self, batch: Stored, file_id: str, name: str, num_bytes: int) -> None:
        file = FileObject(
            id=file_id, bytes=num_bytes, created_at=int(time.time()), filename=name, purpose="batch_output"
        )
        await self._files.commit(
            batch.tenant, file, ttl_ms=batch.number("ttl"), max_tenant_bytes=MAX_TOTAL_BYTES
        )


def _job_id(batch: Stored, line: int) -> str:
    return f"{batch.id}-{line}"


def _custom_id(raw: bytes) -> str:
    found: Any = msgspec.json.decode(raw)
    return str(found.get("custom_id", "")) if isinstance(found, dict) else ""

"""One attempt at a webhook: where it goes, what its outcome means, and when to try again."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpcore
import structlog
from redis.asyncio import Redis

from gateway.lua import redis_now_ms
from gateway.tasks.deliveries import Deliveries, Delivery, Status
from gateway.tasks.outbound import ForbiddenAddressError, Outbound
from gateway.tasks.signing import signed_headers, tenant_secrets
from headrace.config import TasksSettings

FACTOR, LONGEST_DELAY_S, JITTER = 4.0, 3600.0, 0.2
BUSY_DELAY_MS = (500, 2000)
TRY_AGAIN = frozenset({408, 425, 429})  # of 4xx; all others say that trying again is of no use
log = structlog.get_logger("headrace.tasks")


@dataclass(frozen=True, slots=True)
class Outcome:
    """`retry`: another attempt may succeed, not before `after_s`."""

    delivered: bool
    retry: bool = True
    code: int | None = None
    error: str | None = None
    after_s: float = 0.0


class HostLimit:
    """At most so many attempts to a host at a time, so that one that hangs does not take every slot."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._busy: Counter[str] = Counter()

    @contextmanager
    def slot(self, host: str) -> Iterator[bool]:
        """Whether there was room."""
        if self._busy[host] >= self._limit:
            yield False
            return
        self._busy[host] += 1
        try:
            yield True
        finally:
            self._busy[host] -= 1
            if not self._busy[host]:
                del self._busy[host]


class Courier:
    """Carries webhooks out; what came of each is in Redis before it is forgotten here."""

    def __init__(
        self,
        redis: Redis,
        outbound: Outbound,
        settings: TasksSettings,
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._redis = redis
        self._outbound = outbound
        self._settings = settings
        self._hosts = HostLimit(settings.webhook_host_limit)
        self._jitter = jitter

    async def attempt(self, pool: str, delivery_id: str) -> None:
        """Raises RedisError; the attempt is then made again, under the same id."""
        deliveries = Deliveries(self._redis, pool, retention_ms=self._settings.webhook_retention_ms)
        found = await deliveries.read(delivery_id)
        if found is None or found[0].status != "pending":
            return
        delivery, body = found
        with self._hosts.slot(_host(delivery.url)) as free:
            if not free:
                delay_ms = random.randint(*BUSY_DELAY_MS)  # noqa: S311
                await deliveries.postpone(delivery_id, await redis_now_ms(self._redis) + delay_ms)
                return
            began_s = time.monotonic()
            outcome = await self._send(delivery, body)
        await self._settle(deliveries, delivery, outcome, round((time.monotonic() - began_s) * 1000))

    async def _send(self, delivery: Delivery, body: str) -> Outcome:
        secrets = await tenant_secrets(self._redis, delivery.tenant)
        headers = {
            "content-type": "application/json",
            "user-agent": "headrace",
            **signed_headers(secrets, delivery.id, await redis_now_ms(self._redis), body),
        }
        try:
            reply = await self._outbound.post(delivery.url, headers, body.encode())
        except ForbiddenAddressError:
            return Outcome(False, retry=False, error="forbidden_address")
        except TimeoutError:
            return Outcome(False, error="timeout")
        except (OSError, httpcore.NetworkError, httpcore.TimeoutException) as exc:
            return Outcome(False, error=_named(exc))
        except httpcore.ProtocolError:
            return Outcome(False, error="not_http")
        except Exception as exc:  # what a stranger's URL or reply can bring about ends its delivery alone
            return Outcome(False, retry=False, error=type(exc).__name__)
        return judged(reply.status, reply.retry_after_s or 0.0)

    async def _settle(
        self, deliveries: Deliveries, delivery: Delivery, outcome: Outcome, took_ms: int
    ) -> None:
        attempt = delivery.attempts + 1
        again = outcome.retry and not outcome.delivered and attempt < self._settings.webhook_attempts
        status: Status = "delivered" if outcome.delivered else "pending" if again else "failed"
        delay_s = max(self.delay_s(attempt), min(outcome.after_s, LONGEST_DELAY_S)) if again else 0.0
        told = {name: value for name in ("code", "error") if (value := getattr(outcome, name)) is not None}
        await deliveries.settle(delivery, status, delay_s, took_ms=took_ms, **told)
        log.info("webhook", id=delivery.id, job=delivery.job, attempt=attempt, status=status, **told)

    def delay_s(self, attempt: int) -> float:
        """Before the attempt after this one: longer each time, spread by a fifth either way."""
        longest = min(self._settings.webhook_backoff_s * FACTOR ** (attempt - 1), LONGEST_DELAY_S)
        return longest * (1 - JITTER + 2 * JITTER * self._jitter())


def judged(status: int, retry_after_s: float) -> Outcome:
    if 200 <= status < 300:
        return Outcome(True, code=status)
    if 300 <= status < 400:
        return Outcome(False, retry=False, code=status, error="redirect")
    retry = status >= 500 or status in TRY_AGAIN
    return Outcome(False, retry=retry, code=status, error="refused", after_s=retry_after_s)


def _named(exc: Exception) -> str:
    # Not the text: it may hold what an address inside the operator's network said.
    return {"gaierror": "name_not_resolved", "ConnectError": "not_connected"}.get(
        type(exc).__name__, "connection_lost"
    )


def _host(url: str) -> str:
    try:
        return urlsplit(url).netloc.rpartition("@")[2].lower()
    except ValueError:
        return ""

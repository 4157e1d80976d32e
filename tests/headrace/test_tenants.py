"""API keys at rest, token buckets, and the commands that keep them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.errors import HeadraceError
from headrace.keys import API_KEYS, POOLS, Keys, api_key, tenant_policy, tenant_rate
from headrace.tenants import Policy, TenantStore, key_id_of

pytestmark = pytest.mark.redis
PER_MINUTE = Policy(requests_per_minute=60, tokens_per_minute=6000)


@pytest.fixture
def store(pool: Any) -> TenantStore:
    return TenantStore(pool.redis)


async def test_a_key_is_nowhere_at_rest(pool: Any, store: TenantStore) -> None:
    key_id, secret = await store.create_key("acme", name="laptop")
    assert key_id_of(secret) == key_id
    stored = await store.key(key_id)
    assert stored is not None
    assert (stored.tenant, stored.name, stored.revoked_ms) == ("acme", "laptop", 0)
    assert stored.is_of(secret)
    assert not stored.is_of(secret[:-1] + ("0" if secret[-1] != "0" else "1"))
    everything = [await pool.redis.hgetall(api_key(key_id)), await pool.redis.zrange(API_KEYS, 0, -1)]
    assert secret.rsplit("-", 1)[1] not in str(everything)


async def test_a_revoked_key_is_listed_for_a_while(pool: Any, store: TenantStore) -> None:
    ids = [(await store.create_key("acme"))[0] for _ in range(2)]
    assert await store.revoke_key(ids[0])
    assert not await store.revoke_key("0" * 12)
    revoked = {key.id: bool(key.revoked_ms) for key in await store.keys()}
    assert revoked == {ids[0]: True, ids[1]: False}
    assert 0 < await pool.redis.pttl(api_key(ids[0])) <= 30 * 86_400_000
    await pool.redis.delete(api_key(ids[0]))  # its time has come
    assert [key.id for key in await store.keys()] == [ids[1]]
    assert await pool.redis.zcard(API_KEYS) == 1


async def test_a_key_may_expire(pool: Any, store: TenantStore) -> None:
    key_id, _ = await store.create_key("acme", ttl_ms=60_000)
    assert 0 < await pool.redis.pttl(api_key(key_id)) <= 60_000


@pytest.mark.parametrize("tenant", ["", "a b", "x" * 65, "a:b"])
async def test_a_tenant_has_a_name(store: TenantStore, tenant: str) -> None:
    with pytest.raises(HeadraceError, match="tenant"):
        await store.create_key(tenant)
    with pytest.raises(HeadraceError, match="tenant"):
        await store.set_policy(tenant, Policy())


async def test_a_policy_reaches_every_pools_fair_queueing(pool: Any, store: TenantStore) -> None:
    await pool.redis.sadd(POOLS, "t", "other", "not a pool")
    policy = Policy(weight=2.5, models=("a", "b"), tokens_per_month=9)
    await store.set_policy("acme", policy)
    assert await store.policy("acme") == policy
    assert await store.policy("nobody") == Policy()
    for name in ("t", "other"):
        assert await pool.redis.hget(Keys(name).vtime, "w:acme") == b"2.5"


async def test_a_policy_nobody_can_read_lets_nothing_through(pool: Any, store: TenantStore) -> None:
    await pool.redis.set(tenant_policy("acme"), '{"weight": "heavy"}')
    assert not (await store.policy("acme")).allows(frozenset({"smollm2"}))


async def test_buckets_empty_and_fill(pool: Any, store: TenantStore) -> None:
    first = await store.take("acme", PER_MINUTE, requests=1, tokens=100)
    assert first.taken
    assert (first.requests_left, first.tokens_left) == (59, 5900)
    assert 0 < first.requests_full_ms <= 1000
    refused = await store.take("acme", PER_MINUTE, requests=1, tokens=6000)
    assert not refused.taken
    assert 0 < refused.retry_ms <= 1000
    assert refused.requests_left == 59  # taken from both or from neither
    await _age(pool, refused.retry_ms)
    assert (await store.take("acme", PER_MINUTE, requests=1, tokens=6000)).taken


async def test_more_than_a_bucket_holds_passes_when_it_is_full_and_leaves_a_debt(
    pool: Any, store: TenantStore
) -> None:
    assert (await store.take("acme", PER_MINUTE, requests=1, tokens=12_000)).taken
    refused = await store.take("acme", PER_MINUTE, requests=1, tokens=6000)
    assert not refused.taken
    assert 119_000 < refused.retry_ms <= 120_000
    assert refused.tokens_left == 0
    await _age(pool, 60_000)
    assert not (await store.take("acme", PER_MINUTE, requests=1, tokens=6000)).taken


async def test_buckets_are_of_one_tenant_and_forgotten_when_full(pool: Any, store: TenantStore) -> None:
    await store.take("acme", PER_MINUTE, requests=60, tokens=1)
    assert not (await store.take("acme", PER_MINUTE, requests=1, tokens=1)).taken
    assert (await store.take("other", PER_MINUTE, requests=1, tokens=1)).taken
    assert 60_000 < await pool.redis.pttl(tenant_rate("acme")) <= 120_000


async def test_no_crowd_gets_more_than_the_limit(store: TenantStore) -> None:
    policy = Policy(requests_per_minute=20)
    takes = [store.take("acme", policy, requests=1, tokens=10**6) for _ in range(60)]
    taken = [each.taken for each in await asyncio.gather(*takes)]
    assert 20 <= sum(taken) <= 21  # one more may have grown meanwhile


async def _age(pool: Any, ms: int) -> None:
    at = float(await pool.redis.hget(tenant_rate("acme"), "at"))
    await pool.redis.hset(tenant_rate("acme"), "at", at - ms)


def command(url: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "--redis-url", url])


def test_the_commands(redis_url: str) -> None:
    made = command(redis_url, "keys", "create", "acme", "--weight", "3", "--models", "a, b", "--name", "ci")
    assert made.exit_code == 0, made.output
    key_id = key_id_of(made.stdout.strip())
    assert key_id is not None
    listed = command(redis_url, "keys", "list").stdout
    assert key_id in listed
    assert made.stdout.strip() not in listed
    assert "weight=3.0 models=a,b" in listed
    assert command(redis_url, "keys", "limit", "acme", "--models", "").stdout.strip() == "weight=3.0"
    assert command(redis_url, "keys", "revoke", key_id).exit_code == 0
    assert "revoked" in command(redis_url, "keys", "list").stdout
    assert command(redis_url, "keys", "revoke", "nothing").exit_code == 1


def test_a_command_refused_makes_no_key(redis_url: str) -> None:
    refused = command(redis_url, "keys", "create", "acme", "--weight", "5000")
    assert refused.exit_code == 1
    assert "weight" in refused.output
    assert command(redis_url, "keys", "list").stdout.count("acme") == 0


def test_usage_of_a_month(redis_url: str) -> None:
    assert "recomputed" in command(redis_url, "usage").stdout
    assert command(redis_url, "usage", "--month", "soon").exit_code == 1

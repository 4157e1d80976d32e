"""The files of deploy/redis on real servers: users with only their rights, and TLS."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from headrace.connect import connect, connect_sync
from headrace.tenants import Policy, TenantStore

pytestmark = [pytest.mark.redis, pytest.mark.e2e, pytest.mark.timeout(90)]
FILES = Path(__file__).parents[2] / "deploy" / "redis"


@pytest.fixture
def free_port(redis_server) -> int:
    return sys.modules[type(redis_server).__module__].free_port()


@pytest.fixture
def serve(tmp_path, tools) -> Iterator[Callable[..., None]]:
    servers: list[subprocess.Popen[bytes]] = []

    def start(binary: str, client: redis.Redis, *flags: str, conf: Path | None = None) -> None:
        command = [binary, *([str(conf)] if conf else []), "--dir", str(tmp_path), "--save", "", *flags]
        with (tmp_path / "redis.out").open("wb") as out:
            servers.append(subprocess.Popen(command, stdout=out, stderr=out))

        def answers() -> bool:
            try:
                return bool(client.ping())
            except redis.AuthenticationError:
                return True
            except redis.RedisError:
                assert servers[-1].poll() is None, (tmp_path / "redis.out").read_text()
                return False

        tools.eventually(answers, 15)

    yield start
    for server in servers:
        server.kill()
        server.wait()


def url_of(user: str, port: int) -> str:
    return f"redis://{user}:CHANGE-{user}@127.0.0.1:{port}/0"


@pytest.mark.parametrize("kind", ["default", "bundled"])
def test_each_user_can_do_its_work_and_no_more(serve, tools, free_port, redis_servers, kind):
    with redis.Redis.from_url(url_of("operator", free_port)) as operator:
        flags = ["--port", str(free_port), "--aclfile", str(FILES / "users.acl")]
        serve(redis_servers(kind).binary, operator, *flags)
        pool = tools.Pool(url_of("worker", free_port))
        try:
            pool.start("--log-level", "warning")
            producer = redis.Redis.from_url(url_of("producer", free_port))
            entry = producer.xadd(
                pool.keys.queue("normal"), {"prompt": "by ACL", "max_tokens": 9, "temperature": 0}
            )
            job = f"normal-{entry.decode()}"
            assert tools.text_of(pool.wait_end(job, 15)) == tools.answer("by ACL", 9)
            assert producer.hgetall(pool.keys.job(job))[b"status"] == b"done"
            assert producer.xread({pool.keys.log(job): "0"})
            for forbidden in (["FLUSHALL"], ["KEYS", "*"], ["DEL", pool.keys.job(job)], ["GET", "secret"]):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    producer.execute_command(*forbidden)
            producer.close()
            denied = [e for e in operator.acl_log() if e["username"] == "worker" and e["object"] != "client"]
            assert not denied  # CLIENT SETINFO is a courtesy of redis-py
        finally:
            pool.close()


REFUSED_TO_ALL = (
    ["FLUSHALL"],
    ["KEYS", "*"],
    ["CONFIG", "GET", "*"],
    ["GET", "secret"],
    ["SHUTDOWN"],
    ["MONITOR"],
)


@pytest.mark.parametrize(("kind", "users"), [("bundled", "users.acl"), ("default", "users-7.acl")])
def test_users_of_a_whole_deployment(serve, tools, services, hooks, free_port, redis_servers, kind, users):
    with redis.Redis.from_url(url_of("operator", free_port)) as operator:
        flags = ["--port", str(free_port), "--aclfile", str(FILES / users)]
        serve(redis_servers(kind).binary, operator, *flags)
        pool = tools.Pool(url_of("worker", free_port))
        producer = redis.Redis.from_url(url_of("producer", free_port))
        try:
            pool.start("--log-level", "warning")
            services.tasks(url_of("tasks", free_port))
            url = services.gateway(url_of("gateway", free_port))
            key = asyncio.run(make_keys(url_of("gateway", free_port)))
            hooks.wait_for(sys.modules["fleet"].use_everything(url, key, "smollm2", hooks.url))

            entry = producer.xadd(pool.keys.queue("low"), {"prompt": "too long", "max_tokens": 100_000})
            job = f"low-{entry.decode()}"
            tools.eventually(lambda: producer.xlen(pool.keys.log(job)) > 3)
            producer.hset(pool.keys.job(job), "cancel", 1)
            assert producer.publish(pool.keys.ctl, f"cancel {job}") == 1
            assert pool.wait_end(job, 10)[-1].status == "cancelled"

            denied = [entry for entry in operator.acl_log() if entry["object"] != "client"]
            assert not denied  # CLIENT SETINFO is a courtesy of redis-py
            refused(
                free_port, "gateway", *REFUSED_TO_ALL, ["INFO"], ["DEL", "arq:x"], ["PUBLISH", "other", "x"]
            )
            refused(
                free_port, "tasks", *REFUSED_TO_ALL, ["REPLICAOF", "NO", "ONE"], ["PUBLISH", "other", "x"]
            )
            own = pool.keys
            mischief = [
                ["DEL", own.job(job)],
                ["XTRIM", own.queue("low"), "MAXLEN", "0"],
                ["EVAL", "return 1", "0"],
            ]
            mischief += [["HGETALL", own.vtime], ["XADD", own.dead, "*", "a", "b"], ["PUBLISH", "other", "x"]]
            mischief += [["SUBSCRIBE", "other"], ["SCAN", "0"], ["EXPIRE", own.job(job), "1"], ["INFO"]]
            if users == "users-7.acl":  # before Redis 7 a key that may be read may be written too
                mischief += [["XADD", own.log(job), "*", "type", "delta"]]
            refused(free_port, "producer", *REFUSED_TO_ALL, *mischief)
        finally:
            producer.close()
            pool.close()


async def make_keys(redis_url: str) -> str:
    """As `headrace keys` does; one that is valid."""
    client = connect(redis_url)
    store = TenantStore(client)
    revoked, _ = await store.create_key("somebody")
    assert await store.revoke_key(revoked)
    _, key = await store.create_key("somebody")
    await store.set_policy("somebody", Policy(requests_per_minute=1000, weight=2.0))
    assert len(await store.keys()) == 2
    await client.aclose()
    return key


def refused(port: int, user: str, *commands: list[str]) -> None:
    with redis.Redis.from_url(url_of(user, port)) as client:
        for command in commands:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)


def over_tls(folder: Path, port: int) -> tuple[list[str], str]:
    """Flags of a server that speaks nothing else, and the options of a URL to it."""
    key, certificate = str(folder / "redis.key"), str(folder / "redis.crt")
    if not Path(key).exists():
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    flags = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no", "--tls-replication", "yes"]
    flags += ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate]
    return flags, f"ssl_ca_certs={certificate}"


def test_a_worker_over_tls(serve, tools, free_port, redis_server, tmp_path):
    tls, options = over_tls(tmp_path, free_port)
    url = f"rediss://localhost:{free_port}/0?{options}"
    with redis.Redis.from_url(url) as client:
        serve(redis_server.binary, client, *tls)
        pool = tools.Pool(url)
        try:
            pool.start("--log-level", "warning")
            job = pool.submit(prompt="in secret", max_tokens=9, temperature=0)
            assert tools.text_of(pool.wait_end(job, 15)) == tools.answer("in secret", 9)
        finally:
            pool.close()


async def test_sentinels_and_their_master_over_tls(serve, free_port, redis_server, tmp_path):
    other_port = sys.modules["fleet"].free_port()
    tls, options = over_tls(tmp_path, free_port)
    with redis.Redis.from_url(f"rediss://127.0.0.1:{free_port}/0?{options}") as master:
        serve(redis_server.binary, master, *tls, "--requirepass", "of-the-master")
    conf = tmp_path / "sentinel.conf"
    conf.write_text(f"sentinel monitor m 127.0.0.1 {free_port} 1\nsentinel auth-pass m of-the-master\n")
    tls, _ = over_tls(tmp_path, other_port)
    with redis.Redis.from_url(f"rediss://127.0.0.1:{other_port}/0?{options}") as sentinel:
        serve(
            redis_server.binary, sentinel, "--sentinel", *tls, "--requirepass", "of-the-sentinel", conf=conf
        )
    secrets = f"sentinel_password=of-the-sentinel&{options}"
    url = f"rediss+sentinel://:of-the-master@127.0.0.1:{other_port}/m/0?{secrets}"
    client = connect(url)
    assert await client.set("x", 1)
    assert connect_sync(url).get("x") == b"1"
    await client.aclose()

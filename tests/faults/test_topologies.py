"""The files of deploy/redis on real servers: users with only their rights, and TLS."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

pytestmark = [pytest.mark.redis, pytest.mark.e2e, pytest.mark.timeout(90)]
FILES = Path(__file__).parents[2] / "deploy" / "redis"


@pytest.fixture
def free_port(redis_server) -> int:
    return sys.modules[type(redis_server).__module__].free_port()


@pytest.fixture
def serve(tmp_path, tools) -> Iterator[Callable[..., None]]:
    servers: list[subprocess.Popen[bytes]] = []

    def start(binary: str, client: redis.Redis, *flags: str) -> None:
        command = [binary, "--dir", str(tmp_path), "--save", "", *flags]
        with (tmp_path / "redis.out").open("wb") as out:
            servers.append(subprocess.Popen(command, stdout=out, stderr=out))

        def answers() -> bool:
            try:
                return bool(client.ping())
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


def test_a_worker_over_tls(serve, tools, free_port, redis_server, tmp_path):
    key, certificate = tmp_path / "redis.key", tmp_path / "redis.crt"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files, *subject]
    subprocess.run(command, check=True, capture_output=True)
    url = f"rediss://localhost:{free_port}/0?ssl_ca_certs={certificate}"
    tls = ["--port", "0", "--tls-port", str(free_port), "--tls-auth-clients", "no"]
    tls += [
        "--tls-cert-file",
        str(certificate),
        "--tls-key-file",
        str(key),
        "--tls-ca-cert-file",
        str(certificate),
    ]
    with redis.Redis.from_url(url) as client:
        serve(redis_server.binary, client, *tls)
        pool = tools.Pool(url)
        try:
            pool.start("--log-level", "warning")
            job = pool.submit(prompt="in secret", max_tokens=9, temperature=0)
            assert tools.text_of(pool.wait_end(job, 15)) == tools.answer("in secret", 9)
        finally:
            pool.close()

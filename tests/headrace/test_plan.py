import shlex
import socket

import pytest

from headrace.cli.plan import free_port, make_plan, pool_of
from headrace.cli.screen import redis_cli, try_it
from headrace.config import ConfigError


@pytest.mark.parametrize(
    ("model", "pool"),
    [
        (None, "smollm2"),
        ("demo", "smollm2"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b-instruct"),
        ("org/name@main", "name"),
        ("simulated:step_ms=5", "simulated"),
        ("/models/My Model (1).gguf", "my-model-1"),
        ("/models/llama/", "llama"),
        ("...", "..."),
        ("/", "model"),
    ],
)
def test_a_pool_is_named_after_its_model(model: str | None, pool: str) -> None:
    assert pool_of(model) == pool


def test_flags_and_variables_reach_both_services() -> None:
    env = {"HEADRACE_MODEL": "org/tiny", "HEADRACE_LEASE_MS": "900"}
    plan = make_plan(env, {"port": "0", "device": "cpu", "pool": None}, 2)
    assert (plan.worker.pool, plan.gateway.pool) == ("tiny", "tiny")
    assert (plan.worker.device, plan.worker.lease_ms, plan.num_workers) == ("cpu", 900, 2)
    assert plan.own_redis
    assert plan.gateway.port > 0
    assert plan.gateway_url == f"http://127.0.0.1:{plan.gateway.port}"


def test_a_given_redis_is_used() -> None:
    assert not make_plan({"HEADRACE_REDIS_URL": "redis://h:1"}, {"port": "0"}, 1).own_redis
    plan = make_plan({}, {"port": "0", "redis_url": "redis://h:1", "pool": "p"}, 1)
    assert (plan.own_redis, plan.worker.redis_url, plan.worker.pool) == (False, "redis://h:1", "p")


def test_a_gateway_on_all_addresses_is_reached_on_this_machine() -> None:
    env = {"HEADRACE_ALLOW_ANONYMOUS": "1"}
    assert make_plan(env, {"port": "0", "host": "0.0.0.0"}, 1).gateway_url.startswith("http://127.0.0.1:")


def test_a_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 cannot be used .*PORT="):
            free_port("127.0.0.1", port)


def test_an_unknown_host_is_told() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.invalid cannot be used"):
        free_port("nowhere.invalid", 1)


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("redis://127.0.0.1:7379/0", "redis-cli -p 7379"),
        ("redis://localhost", "redis-cli -p 6379"),
        ("rediss://me:secret@host:1/2", "redis-cli --tls -h host -p 1 --user me -n 2"),
        ("unix:///run/redis.sock", "redis-cli -s /run/redis.sock"),
    ],
)
def test_redis_cli_reaches_the_url_without_its_password(url: str, command: str) -> None:
    assert redis_cli(url) == command


def test_the_commands_to_paste_are_shell() -> None:
    text = try_it("redis://:secret@127.0.0.1:7379/0", "http://127.0.0.1:8080", "p", needs_key=True)
    assert "secret" not in text
    assert "XADD 'hr:{p}:q:normal' '*' messages" in text
    assert "$KEY" in text
    for line in text.splitlines()[1:]:
        shlex.split(line)

"""What `headrace up` is to start, checked as far as it can be before anything runs."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import ConfigError, GatewaySettings, WorkerSettings, load_settings
from headrace.models import DEMO

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of both services, with a port that is free."""

    worker: WorkerSettings
    gateway: GatewaySettings
    num_workers: int
    own_redis: bool

    @property
    def gateway_url(self) -> str:
        host = "127.0.0.1" if self.gateway.host in ("0.0.0.0", "::", "") else self.gateway.host  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{self.gateway.port}"


def make_plan(env: Environment, flags: Mapping[str, Any], num_workers: int) -> Plan:
    """Raises ConfigError, also when the port is taken."""
    chosen = dict(flags)
    if not (chosen.get("pool") or env.get("HEADRACE_POOL")):
        chosen["pool"] = pool_of(chosen.get("model") or env.get("HEADRACE_MODEL"))
    worker = load_settings(WorkerSettings, env, _known(WorkerSettings, chosen))
    gateway = load_settings(GatewaySettings, env, _known(GatewaySettings, chosen))
    gateway = msgspec.structs.replace(gateway, port=free_port(gateway.host, gateway.port))
    return Plan(worker, gateway, num_workers, not (chosen.get("redis_url") or env.get("HEADRACE_REDIS_URL")))


def _known(cls: type[msgspec.Struct], chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in chosen.items() if name in cls.__struct_fields__}


def pool_of(model: str | None) -> str:
    """A pool named after the model, so that another model does not get the jobs meant for the first."""
    if not model or model == DEMO:
        return "smollm2"
    name = Path(re.split("[@:]", model)[0]).name.removesuffix(".gguf").lower()
    return re.sub(r"[^a-z0-9._-]+", "-", name).strip("-")[:64] or "model"


def free_port(host: str, port: int) -> int:
    """`port` if it can be listened on, any free one for 0. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise ConfigError(
            f"port {port} on {host} cannot be used ({reason}): choose another by PORT=8081"
        ) from None

"""URLs of Redis: one server, the master that sentinels know, or a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

Address = tuple[str, int]
Kind = Literal["server", "sentinel", "cluster"]
PORTS = {"server": 6379, "sentinel": 26379, "cluster": 6379}
FORMS = (
    "redis://host:6379/0, rediss://…, unix://path, redis+sentinel://host:26379,host:26379/service/0 "
    "or redis+cluster://host:6379,host:6379"
)


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """`server_url` is what redis-py reads: user, password, database and options are those of the servers,
    host and port those of the first node. `nodes` are the sentinels, or any members of the cluster."""

    kind: Kind
    server_url: str
    nodes: tuple[Address, ...] = ()
    service: str = ""
    sentinel_user: str | None = None
    sentinel_password: str | None = None


def parse_redis_url(url: str) -> RedisUrl:
    """Raises ValueError with what would be right."""
    parts = urlsplit(url)
    base, _, kind = parts.scheme.partition("+")
    if parts.scheme in ("redis", "rediss", "unix"):
        return RedisUrl("server", url)
    if base not in ("redis", "rediss") or kind not in ("sentinel", "cluster"):
        raise ValueError(f"a URL like {FORMS}")
    user, _, hosts = parts.netloc.rpartition("@")
    nodes = tuple(_address(host, PORTS[kind]) for host in hosts.split(","))
    options = dict(parse_qsl(parts.query))
    sentinel_user, sentinel_password = (
        options.pop("sentinel_username", None),
        options.pop("sentinel_password", None),
    )
    path = [unquote(part) for part in parts.path.split("/") if part]
    service = path.pop(0) if kind == "sentinel" and path else ""
    database = path[0] if path else options.pop("db", "0")
    if kind == "sentinel" and not service:
        raise ValueError("the service's name behind the hosts, like redis+sentinel://host:26379/mymaster")
    if len(path) > 1 or not database.isdecimal() or (kind == "cluster" and database != "0"):
        raise ValueError("database 0: a cluster has no other" if kind == "cluster" else f"a URL like {FORMS}")
    host, port = nodes[0]
    netloc = f"{user + '@' if user else ''}{f'[{host}]' if ':' in host else host}:{port}"
    server_url = f"{base}://{netloc}/{database}" + (f"?{urlencode(options)}" if options else "")
    found: Kind = "sentinel" if kind == "sentinel" else "cluster"
    return RedisUrl(found, server_url, nodes, service, sentinel_user, sentinel_password)


def _address(text: str, port: int) -> Address:
    parts = urlsplit(f"//{text}")
    try:
        found = parts.port or port
    except ValueError:
        raise ValueError(f"hosts like host:{port}, not {text!r}") from None
    if not parts.hostname:
        raise ValueError(f"hosts like host:{port}, separated by commas")
    return parts.hostname, found

"""What `headrace up` says: progress, its children's lines, and the commands to paste when all is ready."""

from __future__ import annotations

import shlex
import shutil
from urllib.parse import urlsplit

from rich.console import Console
from rich.text import Text

from headrace.config import redact_url
from headrace.keys import Keys
from headrace.redis_url import RedisUrl, parse_redis_url

_STYLES = {"worker": "cyan", "gateway": "magenta"}
PROMPT = "Why is the sky blue?"


class Screen:
    """Lines on stderr, one writer at a time (rich's console has a lock of its own)."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, soft_wrap=True, highlight=False)

    def say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style))

    def show_child(self, name: str, line: str) -> None:
        style = _STYLES.get(name.split("-")[0], "")
        self._console.print(Text.assemble((f"{name} | ", style), line))


def try_it(redis_url: str, gateway_url: str, pool: str, *, needs_key: bool) -> str:
    """Commands that work as they stand, for redis-cli and curl."""
    keys, cli = Keys(pool), redis_cli(redis_url)
    messages = f'[{{"role": "user", "content": "{PROMPT}"}}]'
    add = f"{cli} XADD '{keys.queue('normal')}' '*' messages '{messages}' max_tokens 48"
    follow = f"{cli} XREAD BLOCK 0 STREAMS '{keys.log('normal-')}'$id 0"
    key = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    body = f'{{"model": "{pool}", "stream": true, "messages": {messages}}}'
    curl = f"curl -N {gateway_url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    lines = [
        f"Ready. Pool {pool}: {redact_url(redis_url)} and {gateway_url}/v1. Ctrl-C ends all. Try:",
        "",
        f"  id=$({add})",
        f"  {follow}",
        f"  {cli} HGETALL '{keys.job('normal-')}'$id",
        "",
        f"  {curl}",
        "",
    ]
    if not shutil.which("redis-cli"):
        lines.insert(1, "  (redis-cli is not installed here; `headrace submit` speaks the same protocol)")
    return "\n".join(lines)


def redis_cli(redis_url: str) -> str:
    """`redis-cli` with the flags that reach `redis_url`; the password is left to REDISCLI_AUTH."""
    target = parse_redis_url(redis_url)
    if target.kind == "sentinel":
        return _cli_by_sentinel(target)
    parts = urlsplit(target.server_url)
    words = ["redis-cli", "-c"] if target.kind == "cluster" else ["redis-cli"]
    if parts.scheme == "unix":
        return shlex.join([*words, "-s", parts.path])
    if parts.scheme == "rediss":
        words.append("--tls")
    if parts.hostname not in (None, "127.0.0.1", "localhost"):
        words += ["-h", str(parts.hostname)]
    words += ["-p", str(parts.port or 6379)]
    if parts.username:
        words += ["--user", parts.username]
    database = parts.path.strip("/")
    if database not in ("", "0"):
        words += ["-n", database]
    return shlex.join(words)


def _cli_by_sentinel(target: RedisUrl) -> str:
    """Asks a sentinel in the command itself, so that it holds after a failover too."""
    parts, (host, port) = urlsplit(target.server_url), target.nodes[0]
    tls = ["--tls"] if parts.scheme == "rediss" else []
    ask = [
        "redis-cli",
        *tls,
        "-h",
        host,
        "-p",
        str(port),
        "SENTINEL",
        "GET-MASTER-ADDR-BY-NAME",
        target.service,
    ]
    words = [*tls, *(["--user", parts.username] if parts.username else [])]
    database = parts.path.strip("/")
    words += ["-n", database] if database not in ("", "0") else []
    reach = f"redis-cli -h $(set -- $({shlex.join(ask)}); echo $1 -p $2)"
    return f"{reach} {shlex.join(words)}".rstrip()

"""What llama.cpp's server spends on delivering its tokens, if it is installed (`make bench-peers` does that).

It computes and delivers in one process. With one thread for computing, that is its first thread; the others
hold the connections, write the events as JSON and send them. What the first thread does for delivery (the
token's text, handing it over) is not counted.
"""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine
from benchmarks.gateway_sides import Side
from benchmarks.load import LoadError
from benchmarks.peers.install import PeerFolder
from benchmarks.peers.sessions import free_port
from headrace.config import default_cache_dir
from headrace.models import demo_model_path
from headrace.processes import start_child, stop_child

START_TIMEOUT_S = 60.0
STREAMS = 32
KV_TOKENS = 16_384
BODY = {
    "messages": [{"role": "user", "content": "x"}],
    "stream": True,
    "max_tokens": KV_TOKENS // STREAMS - 64,
    "ignore_eos": True,
    "cache_prompt": False,
    "top_k": 1,
    "samplers": ["top_k"],
}


@dataclass(frozen=True, slots=True)
class Delivery:
    """Of one run with all slots busy."""

    version: str
    streams: int
    tokens_per_s: float
    delivery_us_per_token: float  # of CPU, all threads but the one that computes
    whole_us_per_token: float  # computing included

    def __str__(self) -> str:
        return (
            f"{self.delivery_us_per_token:.1f} µs a token outside of the computing thread, "
            f"{self.whole_us_per_token:.0f} µs in all "
            f"({self.streams} streams, {self.tokens_per_s:.0f} tokens/s, {self.version})"
        )


def deliver_with_llama(results: Path, seconds: float) -> Delivery | str:
    """The figures, or why there are none. Installs nothing."""
    folder = PeerFolder(Path(os.environ.get("HEADRACE_CACHE_DIR") or default_cache_dir()) / "peers")
    program = folder.root / "llama.cpp" / "build" / "bin" / "llama-server"
    if not program.exists():
        return "not installed"
    log = results / "llama-delivery.log"
    port = free_port()
    command = [str(program), "-m", str(demo_model_path()), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-t", "1", "-tb", "1", "-np", str(STREAMS), "-c", str(KV_TOKENS)]
    command += ["--cache-ram", "0", "--no-webui"]
    with log.open("wb") as output:
        process = start_child(command, env=dict(os.environ), output=output)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process)
        return _measure(url, process.pid, folder.version("llama"), seconds)
    except LoadError as problem:
        return f"{problem}; see {log}"
    finally:
        stop_child(process, timeout_s=20.0)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < end_s:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise LoadError("the server did not get ready")


def _measure(url: str, pid: int, version: str, seconds: float) -> Delivery:
    with Side("read", url, STREAMS, seconds, BODY) as reader:
        reader.line()
        before = machine.thread_cpu_s(pid)
        read = reader.found()
        after = machine.thread_cpu_s(pid)
    spent_us = {thread: (cpu_s - before.get(thread, 0.0)) * 1e6 for thread, cpu_s in after.items()}
    whole_us, tokens = sum(spent_us.values()), read["tokens"]
    delivery_us = (whole_us - spent_us[pid]) / tokens
    return Delivery(version, STREAMS, tokens / read["wall_s"], delivery_us, whole_us / tokens)

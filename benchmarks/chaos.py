"""The proof of the queue: jobs run while workers, connections and Redis itself are killed and frozen.

`make chaos` (or `python -m benchmarks.chaos --jobs 400 --seed 7`). All of it is real but the model, which
is simulated unless `--real`: a redis-server with an append-only file, worker processes, an attached follower
for each job. What every follower heard is compared, event for event, with an undisturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis
from rich.console import Console

from headrace.chaos import Crowd, Request, make_requests, report, with_expected
from headrace.client import Client
from headrace.keys import Keys
from worker.simulated import Answer, make_codec

POOL = "chaos"
LEASE_MS = 1_000
START_S = 60.0
REDIS_OPTIONS = {
    "bind": "127.0.0.1",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "save": "",
    "aof-load-truncated": "yes",
}


class Server:
    """A redis-server with an append-only file, to be killed and started again."""

    def __init__(self, binary: str, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._binary, self._folder = binary, folder
        self._process: subprocess.Popen[bytes] | None = None

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def start(self) -> None:
        options = {**REDIS_OPTIONS, "port": str(self.port), "dir": str(self._folder)}
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        with (self._folder / "redis.out").open("ab") as out:
            self._process = subprocess.Popen([self._binary, *flags], stdout=out, stderr=out)
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with suppress(redis.RedisError), self.client() as client:
                client.ping()
                return
            time.sleep(0.02)
        raise RuntimeError("redis-server did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def cut(self, share: float) -> None:
        """Drops the tail of the append-only file, as a loss of power drops what was not synced."""
        files = [*self._folder.glob("appendonlydir/*.incr.aof"), *self._folder.glob("appendonly.aof")]
        newest = max(files, key=lambda path: path.stat().st_mtime)
        os.truncate(newest, int(newest.stat().st_size * (1 - share)))


class Fleet:
    """Worker processes, each started again when it is killed, under a new id."""

    def __init__(self, url: str, model: str, folder: Path, max_num_seqs: int) -> None:
        self._flags = ["--redis-url", url, "--pool", POOL, "--lease-ms", str(LEASE_MS), "--model", model]
        # Killing at random, a job alone may well be hit twice: no death is evidence here.
        self._flags += ["--max-num-seqs", str(max_num_seqs), "--log-format", "json", "--max-attempts", "1000"]
        self._folder = folder
        self._started = 0
        self.workers: list[subprocess.Popen[bytes]] = []
        self.died: list[int] = []

    def add(self) -> None:
        self._started += 1
        env = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        command = [sys.executable, "-m", "worker", *self._flags, "--worker-id", f"w{self._started}"]
        with (self._folder / f"w{self._started}.log").open("wb") as out:
            self.workers.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))

    def wait_ready(self, client: Any) -> None:
        """Raises RuntimeError if a worker ends instead."""
        while client.zcard(Keys(POOL).workers) < len(self.workers):
            if any(worker.poll() is not None for worker in self.workers):
                raise RuntimeError("a worker did not start: see its log (--keep)")
            time.sleep(0.05)

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        worker.kill()
        worker.wait()
        self.workers.remove(worker)
        self.add()

    def replace_dead(self) -> None:
        for worker in [w for w in self.workers if w.poll() is not None]:
            self.died.append(worker.returncode)
            self.workers.remove(worker)
            self.add()

    def stop(self) -> None:
        for worker in self.workers:
            with suppress(ProcessLookupError):
                worker.send_signal(signal.SIGCONT)
                worker.terminate()
        for worker in self.workers:
            try:
                worker.wait(15)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self.workers.clear()


class Storm:
    """Carries out a seeded list of faults, one after the other; freezes thaw in the background."""

    def __init__(self, args: argparse.Namespace, server: Server, fleet: Fleet) -> None:
        self._rng = random.Random(args.seed)
        self._server, self._fleet, self._cut = server, fleet, args.cut
        self._pause_s: float = args.pause_s
        self._frozen: set[int] = set()
        self._thawing: set[asyncio.Task[None]] = set()
        counts = {"kill": args.kills, "freeze": args.freezes, "storm": args.storms, "redis": args.redis_kills}
        self._plan = [name for name, count in counts.items() for _ in range(count)]
        self._rng.shuffle(self._plan)
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        actions: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "storm": self._connections,
            "redis": self._redis,
        }
        for name in self._plan:
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self._pause_s)
            self._fleet.replace_dead()
            await actions[name]()
            self.done[name] += 1
        await asyncio.gather(*self._thawing)

    def _choose(self) -> subprocess.Popen[bytes]:
        awake = [w for w in self._fleet.workers if w.pid not in self._frozen]
        return self._rng.choice(awake or self._fleet.workers)

    async def _kill(self) -> None:
        self._fleet.kill(self._choose())

    async def _freeze(self) -> None:
        worker = self._choose()
        worker.send_signal(signal.SIGSTOP)
        self._frozen.add(worker.pid)
        task = asyncio.create_task(self._thaw(worker, self._rng.uniform(1.2, 2.5) * LEASE_MS / 1000))
        self._thawing.add(task)
        task.add_done_callback(self._thawing.discard)

    async def _thaw(self, worker: subprocess.Popen[bytes], after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._frozen.discard(worker.pid)
        worker.send_signal(signal.SIGCONT)

    async def _connections(self) -> None:
        for _ in range(5):
            with suppress(redis.RedisError), self._server.client() as client:
                client.client_kill_filter(_type="normal", skipme=True)
                client.client_kill_filter(_type="pubsub", skipme=True)
            await asyncio.sleep(0.05)

    async def _redis(self) -> None:
        self._server.kill()
        if self._cut:
            self._server.cut(self._cut)
        await asyncio.sleep(self._rng.uniform(0.1, 1.0))
        await asyncio.to_thread(self._server.start)


def check_text(requests: Sequence[Request], max_tokens: int) -> int:
    """How many undisturbed answers are not what the simulated model must say: the oracle's own check."""
    codec, wrong = make_codec(), 0
    for request in requests:
        if request.kind in ("stop", "chat"):
            continue
        ids = codec.encode_prompt(request.fields["prompt"])
        greedy = request.fields["temperature"] == 0
        for choice in range(request.fields.get("n", 1)):
            answer = Answer(ids, 0 if greedy else request.fields["seed"], 0 if greedy else choice)
            said = "".join(part[3] for part in request.expected if part[1] == "delta" and part[2] == choice)
            wrong += said != answer.text(max_tokens)
    return wrong


async def rehearse(args: argparse.Namespace, server: Server, fleet: Fleet) -> dict[str, object]:
    requests = make_requests(args.seed, args.jobs, args.tokens)
    async with Client(server.url, POOL, max_connections=32) as client:
        calm = Crowd(client, at_once=2 * args.workers * args.max_num_seqs)
        requests = with_expected(requests, await calm.run(requests, "calm"))
        wrong = 0 if args.real else check_text(requests, args.tokens)
        storm = Storm(args, server, fleet)
        firing = asyncio.create_task(storm.run())
        crowd = Crowd(client, at_once=args.workers * args.max_num_seqs, may_lose=args.cut > 0)
        rounds, end_s = 0, time.monotonic() + args.limit_s
        while rounds == 0 or (not firing.done() and time.monotonic() < end_s):
            await crowd.run(requests, f"fire{rounds}")
            rounds += 1
        await firing
    left = await settled(server)
    for heard in [h for h in crowd.heard if h.fault][:10]:
        print(f"bad: {heard.job_id} ({heard.request.kind}, attempt {heard.attempt}): {heard.fault}")
    done = storm.done
    events = {"kills": done["kill"], "freezes": done["freeze"], "storms": done["storm"]}
    events |= {"redis_kills": done["redis"], "workers_died": len(fleet.died), "wrong_oracle": wrong}
    return {**report(crowd.heard), **events, **left}


async def settled(server: Server) -> dict[str, object]:
    """What the pool still holds once every job has ended: nothing, and no key without owner or TTL."""
    keys = Keys(POOL)
    with server.client() as client:
        for _ in range(100):
            queued = sum(client.xlen(keys.queue(c)) for c in ("high", "normal", "low"))
            leases = client.zcard(keys.leases)
            if not queued and not leases:
                break
            await asyncio.sleep(0.1)
        jobs = [name for name in client.scan_iter(keys.job("*")) if client.pttl(name) < 0]
        logs = [name for name in client.scan_iter(keys.log("*")) if client.pttl(name) < 0]
        dead = client.xlen(keys.dead)
    return {"left_entries": queued, "left_leases": leases, "no_ttl": len(jobs) + len(logs), "dead": dead}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    numbers = {"jobs": 400, "tokens": 120, "workers": 3, "max-num-seqs": 8, "kills": 20, "freezes": 20}
    for name, default in {**numbers, "storms": 20, "redis-kills": 2, "seed": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pause-s", type=float, default=1.2, help="mean time between two faults")
    parser.add_argument("--step-ms", type=float, default=15, help="of the simulated model")
    parser.add_argument("--limit-s", type=float, default=600, help="no further round of jobs after this")
    parser.add_argument("--cut", type=float, default=0, help="share of the AOF lost with each kill of Redis")
    parser.add_argument("--real", action="store_true", help="the demo model instead of the simulated one")
    parser.add_argument("--redis-server", default=shutil.which("redis-server"))
    parser.add_argument("--keep", action="store_true", help="keep logs and Redis's files, and say where")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    folder = Path(tempfile.mkdtemp(prefix="hr-chaos-"))
    server = Server(args.redis_server, folder)
    model = "" if args.real else f"simulated:step_ms={args.step_ms}"
    fleet = Fleet(server.url, model, folder, args.max_num_seqs)
    try:
        server.start()
        for _ in range(args.workers):
            fleet.add()
        with server.client() as client:
            fleet.wait_ready(client)
        figures = asyncio.run(rehearse(args, server, fleet))
    finally:
        fleet.stop()
        server.kill()
        if args.keep:
            print(folder, file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    Console(soft_wrap=True).print_json(json.dumps(figures))
    return 1 if figures["bad_jobs"] or figures["wrong_oracle"] or figures["left_entries"] else 0


if __name__ == "__main__":
    sys.exit(main())

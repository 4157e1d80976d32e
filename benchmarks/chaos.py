"""The proof of the queue: jobs run while workers, gateways, connections and Redis are killed and frozen.

`make chaos` (or `python -m benchmarks.chaos --jobs 400 --seed 7`). All of it is real but the model, which
is simulated unless `--real`: a redis-server with an append-only file, worker processes, gateway processes,
and somebody who listens to each job, every third one over HTTP, the others at Redis. What everyone heard is
compared, event for event, with an undisturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmarks.processes import POOL, Fleet, Gateways, Server
from benchmarks.sse import SseClient
from benchmarks.storm import Storm
from headrace.chaos import Crowd, Request, make_requests, report, with_expected
from headrace.client import Client
from headrace.keys import Keys
from headrace.logs import configure_logging
from worker.simulated import Answer, make_codec

SETTLE_S = 60  # for what is left when the last listener has gone
NUMBERS = {
    "jobs": (400, 60),
    "tokens": (120, 60),
    "workers": (3, 2),
    "max-num-seqs": (8, 8),
    "kills": (20, 4),
    "freezes": (20, 4),
    "storms": (20, 6),
    "redis-kills": (2, 1),
    "gateway-kills": (6, 3),
    "seed": (1, 1),
}  # unless told otherwise: with the simulated model, with a real one


class Processes(NamedTuple):
    server: Server
    fleet: Fleet
    gateways: Gateways


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


async def rehearse(args: argparse.Namespace, processes: Processes) -> dict[str, object]:
    server, fleet, gateways = processes
    requests = make_requests(args.seed, args.jobs, args.tokens)
    counts = {"kill": args.kills, "freeze": args.freezes, "storm": args.storms, "redis": args.redis_kills}
    counts["gateway"] = args.gateway_kills
    pace = {"seed": args.seed, "pause_s": args.pause_s, "cut": args.cut}
    storm = Storm(counts, server, fleet, gateways, **pace)
    async with Client(server.url, POOL, max_connections=32) as client, SseClient(gateways.urls) as sse:
        calm = Crowd(client, at_once=2 * args.workers * args.max_num_seqs)
        requests = with_expected(requests, await calm.run(requests, "calm"))
        wrong = 0 if args.real else check_text(requests, args.tokens)
        firing = asyncio.create_task(storm.run())
        at_once, may_lose = args.workers * args.max_num_seqs, args.cut > 0
        crowd = Crowd(client, client, sse, at_once=at_once, may_lose=may_lose)
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
    events |= {"redis_kills": done["redis"], "gateway_kills": done["gateway"]}
    events |= {"streams_resumed": sse.resumed, "workers_died": len(fleet.died), "wrong_oracle": wrong}
    return {**report(crowd.heard), **events, **left}


async def settled(server: Server) -> dict[str, object]:
    """What the pool still holds once every job has ended: nothing, and no key without owner or TTL."""
    keys = Keys(POOL)
    with server.client() as client:
        for _ in range(10 * SETTLE_S):
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
    parser.add_argument("--real", action="store_true", help="the demo model instead of the simulated one")
    for name, (simulated, real) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, help=f"default {simulated}, with --real {real}")
    parser.add_argument("--pause-s", type=float, help="mean time between two faults; 1.2, with --real 3")
    parser.add_argument("--step-ms", type=float, default=15, help="of the simulated model")
    parser.add_argument("--limit-s", type=float, default=600, help="no further round of jobs after this")
    parser.add_argument("--cut", type=float, default=0, help="share of the AOF lost with each kill of Redis")
    parser.add_argument("--redis-server", default=shutil.which("redis-server"))
    parser.add_argument("--keep", action="store_true", help="keep logs and Redis's files, and say where")
    args = parser.parse_args()
    for name, choice in {**NUMBERS, "pause-s": (1.2, 3.0)}.items():
        if getattr(args, name.replace("-", "_")) is None:
            setattr(args, name.replace("-", "_"), choice[args.real])
    return args


def main() -> int:
    args = arguments()
    configure_logging("console", "error")
    folder = Path(tempfile.mkdtemp(prefix="hr-chaos-"))
    server = Server(args.redis_server, folder)
    model = "" if args.real else f"simulated:step_ms={args.step_ms}"
    fleet = Fleet(server.url, model, folder, args.max_num_seqs)
    gateways = Gateways(server.url, folder, 2)
    try:
        server.start()
        gateways.start()
        for _ in range(args.workers):
            fleet.add()
        with server.client() as client:
            fleet.wait_ready(client)
        gateways.wait_ready()
        figures = asyncio.run(rehearse(args, Processes(server, fleet, gateways)))
    finally:
        fleet.stop()
        gateways.stop()
        server.kill()
        if args.keep:
            print(folder, file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    Console(soft_wrap=True).print_json(json.dumps(figures))
    return 1 if any(figures[name] for name in ("bad_jobs", "wrong_oracle", "left_entries", "no_ttl")) else 0


if __name__ == "__main__":
    sys.exit(main())

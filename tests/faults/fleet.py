"""Several servers at once, and the processes of a deployment over them."""

from __future__ import annotations

import http.server
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import redis

from headrace.places import NUM_SLOTS

WAIT_S = 20.0


PORTS = itertools.cycle(range(11_000, 15_000))


def free_port() -> int:
    """One that has another for a cluster's bus, 10,000 above it; both below those that connections get."""
    for port in PORTS:
        with socket.socket() as probe, socket.socket() as bus, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10_000))
            return port
    raise AssertionError("never")


def eventually(look: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    end_s = time.monotonic() + timeout_s
    while not (value := look()):
        assert time.monotonic() < end_s, f"still {value!r} after {timeout_s} s"
        time.sleep(0.01)
    return value


def use_everything(url: str, key: str, model: str, hook: str) -> str:
    """Uses each part of a gateway once. The id of a job that tells `hook` of its end."""
    body = {"model": model, "prompt": "everything", "max_tokens": 4, "temperature": 0}
    with httpx.Client(base_url=url, timeout=30, headers={"Authorization": f"Bearer {key}"}) as http:

        def asked(method: str, path: str, **options: Any) -> Any:
            answer = http.request(method, path, **options)
            assert answer.status_code < 300, f"{path}: {answer.text}"
            return answer

        assert "data: [DONE]" in asked("POST", "/v1/completions", json={**body, "stream": True}).text
        told = asked("POST", "/v1/jobs", json={**body, "webhook": hook}).json()["id"]
        asked("DELETE", f"/v1/jobs/{told}")
        for path in ("models", "jobs", f"jobs/{told}", "usage", "webhooks/secret", "webhooks/deliveries"):
            asked("GET", f"/v1/{path}")
        said = asked("POST", "/v1/responses", json={"model": model, "input": "x", "max_output_tokens": 3})
        asked("DELETE", f"/v1/responses/{said.json()['id']}")
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        file = asked("POST", "/v1/files", files={"file": json.dumps(line)}, data={"purpose": "batch"}).json()
        order = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = asked("POST", "/v1/batches", json=order).json()["id"]
        eventually(lambda: asked("GET", f"/v1/batches/{batch}").json()["status"] == "completed", 30)
        asked("DELETE", f"/v1/files/{file['id']}")
        asked("GET", "/metrics")
    return str(told)


class Fleet:
    """Servers that know each other, each in a folder of its own, where it stays over `kill` and `start`."""

    def __init__(self, binary: str, folder: Path) -> None:
        self.binary = binary
        self.folder = folder
        self._commands: dict[int, list[str]] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def add(self, *flags: str, config: str | None = None) -> int:
        """Starts one with these flags; the port it answers on. `config`: text that the server may rewrite."""
        port = free_port()
        folder = self.folder / str(port)
        folder.mkdir()
        command = [self.binary]
        if config is not None:
            (folder / "server.conf").write_text(config)
            command.append(str(folder / "server.conf"))
        self._commands[port] = [*command, "--port", str(port), "--dir", str(folder), "--save", "", *flags]
        self.start(port)
        return port

    def start(self, port: int) -> None:
        with (self.folder / f"{port}.out").open("ab") as out:
            self._processes[port] = subprocess.Popen(self._commands[port], stdout=out, stderr=out)
        eventually(lambda: self._answers(port), 15)

    def _answers(self, port: int) -> bool:
        try:
            return bool(self.client(port).ping())
        except redis.RedisError:
            assert self._processes[port].poll() is None, (self.folder / f"{port}.out").read_text()
            return False

    def client(self, port: int) -> redis.Redis:
        return redis.Redis(port=port, socket_timeout=10, protocol=2)

    def replicate(self, port: int, key: str) -> None:
        """Returns when a replica has all that was written so far, and is sent what comes.

        One that is `online` is sent nothing before it has acknowledged once, up to a second later. WAIT looks
        at what its own connection has written, hence the key.
        """
        master = self.client(port)
        with master.pipeline(transaction=False) as pipe:
            got = pipe.set(key, 1).wait(1, 9_000).delete(key).execute()
        assert got[1] == 1

    def process(self, port: int) -> subprocess.Popen[bytes]:
        return self._processes[port]

    def kill(self, port: int) -> None:
        self._processes[port].kill()
        self._processes[port].wait()

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


class Cluster:
    """Three masters, and a replica of the one that has the pool `smollm2` if asked for."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2500", "--appendonly", "no")
        flags += ("--cluster-require-full-coverage", "no")
        self.flags = (*flags, "--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0")
        self.ports = [fleet.add(*self.flags) for _ in range(3)]
        bounds = [0, NUM_SLOTS // 3, 2 * NUM_SLOTS // 3, NUM_SLOTS]
        for number, port in enumerate(self.ports):
            node = fleet.client(port)
            node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.execute_command("CLUSTER", "ADDSLOTS", *range(bounds[number], bounds[number + 1]))
            self.meet(port)
        self.url = f"redis+cluster://127.0.0.1:1,127.0.0.1:{self.ports[1]}"
        eventually(lambda: all(self.agrees(port) for port in self.ports), 30)

    def meet(self, port: int) -> None:
        self.fleet.client(port).execute_command("CLUSTER", "MEET", "127.0.0.1", self.ports[0])

    def agrees(self, port: int) -> bool:
        info = self.fleet.client(port).execute_command("CLUSTER", "INFO").decode()
        wanted = (
            "cluster_state:ok",
            f"cluster_slots_ok:{NUM_SLOTS}",
            f"cluster_known_nodes:{len(self.ports)}",
        )
        return all(f"{each}\r" in info for each in wanted)

    def node_id(self, port: int) -> str:
        return self.fleet.client(port).execute_command("CLUSTER", "MYID").decode()

    def flags_of(self, port: int) -> list[str]:
        """What the third node thinks of another."""
        nodes = self.fleet.client(self.ports[2]).execute_command("CLUSTER", "NODES")
        lines = nodes.splitlines() if isinstance(nodes, str) else nodes.decode().splitlines()
        return next(line.split()[2].split(",") for line in lines if f":{port}@" in line)

    def owner(self, slot: int) -> int:
        return next(
            first[1]
            for start, end, first, *_ in self.fleet.client(self.ports[2]).execute_command("CLUSTER", "SLOTS")
            if start <= slot <= end
        )

    def add_replica(self, master: int, key: str) -> int:
        """`key`: one that this master owns."""
        port = self.fleet.add(*self.flags)
        self.ports.append(port)
        self.meet(port)
        eventually(lambda: all(self.agrees(each) for each in self.ports), 30)
        self.fleet.client(port).execute_command("CLUSTER", "REPLICATE", self.node_id(master))
        eventually(lambda: self.fleet.client(port).info("replication")["master_link_status"] == "up", 20)
        self.fleet.replicate(master, key)
        return port

    def move(self, slot: int, halfway: threading.Event, go_on: threading.Event) -> None:
        """Moves a slot with its keys to another node; stops for a while when half of them are there."""
        source = self.owner(slot)
        target = next(port for port in self.ports if port != source)
        old, new = self.fleet.client(source), self.fleet.client(target)
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.node_id(source))
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.node_id(target))
        keys = old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        for key in keys[: len(keys) // 2]:
            old.execute_command("MIGRATE", "127.0.0.1", target, key, 0, 5000)
        halfway.set()
        go_on.wait(10)
        while keys := old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            old.execute_command("MIGRATE", "127.0.0.1", target, "", 0, 5000, "KEYS", *keys)
        for node in (new, old):
            node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", self.node_id(target))


class Services:
    """`python -m gateway` and `python -m gateway.tasks`; what they say is in files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, module: str, **settings: str) -> subprocess.Popen[bytes]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        env |= {f"HEADRACE_{name.upper()}": value for name, value in settings.items()}
        env |= {"HEADRACE_LOG_FORMAT": "json"}
        with (self._folder / f"{module}.out").open("wb") as out:
            self._running[module] = subprocess.Popen([sys.executable, "-m", module], env=env, stderr=out)
        return self._running[module]

    def gateway(self, redis_url: str, **settings: str) -> str:
        """The address of one that is ready."""
        port = free_port()
        process = self.start("gateway", redis_url=redis_url, port=str(port), **settings)
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            assert process.poll() is None, self.said("gateway")
            try:
                with urllib.request.urlopen(f"{url}/readyz", timeout=2) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        eventually(ready)
        return url

    def tasks(self, redis_url: str) -> subprocess.Popen[bytes]:
        quick = {"webhook_backoff_s": "0.1", "webhook_timeout_s": "2"}
        return self.start("gateway.tasks", redis_url=redis_url, webhook_networks="127.0.0.0/8", **quick)

    def said(self, module: str) -> str:
        return (self._folder / f"{module}.out").read_text()

    def events(self, module: str) -> list[str]:
        """Names of the log's lines, in order. Fails for a line that is none, such as a traceback's."""
        return [json.loads(line)["event"] for line in self.said(module).splitlines()]

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


class Hooks:
    """Takes webhooks: `jobs` are the ids of those it was told of."""

    def __enter__(self) -> Hooks:
        jobs = self.jobs = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                jobs.append(json.loads(body)["data"]["id"])
                self.send_response(204)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait_for(self, job_id: str) -> None:
        eventually(lambda: job_id in self.jobs)

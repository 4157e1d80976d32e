"""The processes that share one model: started, brought together, watched and ended by the first of them.

The first is the worker. The others do as it says and end with it, however it ends. If one of them ends or
fails first, the worker ends in that moment, as if it had been killed itself: its leases run out, other
workers go on with its jobs, and a prompt that does this again and again is found.
"""

from __future__ import annotations

import atexit
import datetime
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import structlog
import torch
import torch.distributed as dist

from headrace.config import env_name
from headrace.models import ModelError
from headrace.processes import describe_exit, kill_group, start_child
from worker.model.checkpoint import UnsupportedModel
from worker.model.selftest import Forward
from worker.model.tensor_parallel import find_cuts, shard
from worker.model.tensor_parallel_steps import ParallelModel
from worker.model.tensor_parallel_wire import Channel, Loaded, Meeting, Packed, Task, broadcast

log = structlog.get_logger("headrace.worker")

EXIT_BROKEN = 70
FOLLOWER = "worker.model.tensor_parallel_follower"
_HOST = "127.0.0.1"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_MEETING_TIME = datetime.timedelta(minutes=30)  # of one exchange; a step that hangs is the watchdog's


def make_task(
    size: int,
    path: Path,
    device: torch.device,
    dtype: str,
    trust_remote_code: bool,
    cache_dir: str | Path | None,
    *,
    threads: int,
) -> Task:
    """The first process's. `threads`: of all together. Raises ModelError where this machine is too small."""
    _check_machine(size, device)
    return Task(
        rank=0,
        size=size,
        path=str(path),
        device=_device_of(device, 0),
        dtype=dtype,
        threads=max(1, threads // size),
        trust_remote_code=trust_remote_code,
        cache_dir=None if cache_dir is None else str(cache_dir),
    )


def _check_machine(size: int, device: torch.device) -> None:
    backend = _backend(device)
    if not (dist.is_available() and dist.is_backend_available(backend)):
        raise _refusal(size, f"this torch was built without {backend}; set it to 1")
    count = torch.cuda.device_count()
    if device.type == "cuda" and count < size:
        raise _refusal(size, f"each process needs a GPU, and there are {count}; set it to at most that")


def _refusal(size: int, text: str) -> ModelError:
    return ModelError(f"{env_name('tensor_parallel')}={size}: {text}")


def _device_of(device: torch.device, rank: int) -> str:
    return f"cuda:{rank}" if device.type == "cuda" else str(device)


def join(store: dist.Store, rank: int, size: int, device: torch.device) -> None:
    """Become a member of the default group, which speaks on the loopback interface alone."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _LOOPBACK
    card = device if device.type == "cuda" else None
    if card is not None:
        torch.cuda.set_device(card)
    dist.init_process_group(
        _backend(device), store=store, rank=rank, world_size=size, timeout=_MEETING_TIME, device_id=card
    )


def meet(port: int, size: int) -> dist.Store:
    return dist.TCPStore(_HOST, port, size, is_master=False, timeout=_MEETING_TIME)


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


class Group:
    """The first process's hold on the others. Make it on the main thread: they live as long as that."""

    def __init__(self, task: Task) -> None:
        """Starts the others. `task` is the first one's own."""
        self.size = task.size
        self.exact = True  # the others' products are
        self._device = torch.device(task.device)
        self._serving = self._closing = False
        self._channels: list[Channel] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        atexit.register(self.close)
        for rank in range(1, task.size):
            device = _device_of(self._device, rank)
            self._start(msgspec.structs.replace(task, rank=rank, device=device))

    def _start(self, task: Task) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", FOLLOWER, str(theirs.fileno())]
            self._processes.append(start_child(command, pass_fds=(theirs.fileno(),)))
        self._channels.append(Channel(ours))
        self._channels[-1].send(task)

    def cut(self, model: Any) -> None:
        """Brings the processes together, each with its share of the model, in place.

        Raises ModelError where it cannot be cut, or another process could not load it.
        """
        try:
            cuts = find_cuts(model, self.size)
        except UnsupportedModel as problem:
            raise _refusal(self.size, f"{problem}; set it to 1") from problem
        for rank, channel in enumerate(self._channels, 1):
            loaded: Loaded | None = channel.receive(Loaded)
            if loaded is None or loaded.error:
                reason = loaded.error if loaded else "it ended; is there too little memory?"
                raise _refusal(self.size, f"process {rank} cannot load it: {reason}")
        with socket.create_server((_HOST, 0)) as listening:
            port = listening.getsockname()[1]
            store = dist.TCPStore(
                _HOST, port, self.size, is_master=True, timeout=_MEETING_TIME, wait_for_workers=False,
                master_listen_fd=os.dup(listening.fileno()),  # its own would listen on every interface
            )  # fmt: skip
        self._watch()
        broadcast(self._channels, Meeting(port))
        join(store, 0, self.size, self._device)
        shard(model, cuts)
        model.to(self._device)

    def lead(self, share: Forward) -> ParallelModel:
        """The whole model, once all have made their shares ready to run."""
        packed: list[Packed | None] = [channel.receive(Packed) for channel in self._channels]
        self.exact = all(p is not None and p.exact for p in packed)
        return ParallelModel(share, self.send, self._fail)

    def serve(self) -> None:
        """Nothing can be refused any more: from now on a failure ends the process."""
        self._serving = True

    def send(self, message: msgspec.Struct) -> None:
        broadcast(self._channels, message)

    def _fail(self, error: Exception) -> None:
        """A step failed here. What the others make of it is unknown, so once jobs run all is over."""
        if self._serving:
            _leave("a step failed", exc_info=error)

    def close(self) -> None:
        """Ends the others at once: they hold nothing that could be lost."""
        self._closing = True
        atexit.unregister(self.close)
        for process in self._processes:
            kill_group(process)
        for process, channel in zip(self._processes, self._channels, strict=True):
            process.wait()
            channel.close()

    def _watch(self) -> None:
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch_one, args=(rank, process), daemon=True).start()

    def _watch_one(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._closing:
            _leave(f"process {rank}: {describe_exit(status)}")


def _leave(reason: str, **more: Any) -> NoReturn:
    """Ends the process at once: the others may never answer again."""
    log.critical(
        "tensor_parallel_broken", reason=reason, advice="the process ends; other workers take over", **more
    )
    os._exit(EXIT_BROKEN)

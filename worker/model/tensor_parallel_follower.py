"""`python -m worker.model.tensor_parallel_follower <fd>`: one more process of a worker's model.

Started by the worker, which says over the socket `fd` what to do; ends when that closes.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from typing import Any

from headrace.config import CommonSettings, env_name, load_settings
from headrace.logs import configure_logging
from worker.model.tensor_parallel_wire import Channel, Loaded, Meeting, Packed, Task


def main() -> int:
    # Whoever tells all processes to end tells the worker, too, which may have jobs to give back first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _configure_logging()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    task = channel.receive(Task)
    try:
        return 0 if task is None else _serve(channel, task)
    except BrokenPipeError:  # the worker has given up before us
        return 0


def _configure_logging() -> None:
    name = env_name("log_format")
    settings = load_settings(CommonSettings, {name: os.environ.get(name, "")})
    configure_logging(settings.log_format, "warning")  # the worker has said the rest


def _serve(channel: Channel, task: Task) -> int:
    import torch

    from worker.model.loader import pack
    from worker.model.tensor_parallel import shard
    from worker.model.tensor_parallel_group import join, meet
    from worker.model.tensor_parallel_steps import follow
    from worker.model.trim import trim_memory

    torch.set_num_threads(task.threads)
    device = torch.device(task.device)
    try:
        model, cuts = _load(task, device)
    except Exception as problem:  # of any kind: the worker tells it in its own words
        channel.send(Loaded((str(problem).strip() or type(problem).__name__).splitlines()[0]))
        return 1
    channel.send(Loaded())
    if (meeting := channel.receive(Meeting)) is None:
        return 0
    join(meet(meeting.port, task.size), task.rank, task.size, device)
    shard(model, cuts)
    forward, linears = pack(model.to(device), device)
    channel.send(Packed(linears.exact))
    gc.collect()
    trim_memory()
    follow(channel, forward, device)
    return 0


def _load(task: Task, device: Any) -> tuple[Any, Any]:
    from pathlib import Path

    from worker.model.checkpoint import load_plain
    from worker.model.tensor_parallel import find_cuts

    how = (task.dtype, task.trust_remote_code, task.cache_dir)
    model, _ = load_plain(Path(task.path), device, *how, on_host=True)
    return model, find_cuts(model, task.size)


if __name__ == "__main__":
    sys.exit(main())

"""What is left of a worker's speed when its cores are wanted by others too: in proportion, or nothing?

    python -m benchmarks.busy [--others 2] [--batch 1,32] [--activations fp32] [--rounds 5] [--seconds 2]

Decode steps of the real model alone, then beside processes that only count, in turns. They and the model's
threads want the cores; the fair share of the speed is what cores there are for each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.profile_step import Decoding
from headrace.config import default_cache_dir
from worker.model.loader import LoadedModel, load
from worker.text.codec import load_tokenizer

CONTEXT, TOKENS = 64, 1000
COUNTING = "while True: pass"


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """That many processes count meanwhile."""
    running = [subprocess.Popen([sys.executable, "-c", COUNTING]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def tokens_per_s(loaded: LoadedModel, batch: int, seconds: float) -> float:
    decoding = Decoding(loaded, load_tokenizer(loaded.path), batch, CONTEXT, TOKENS)
    decoding.warm_up()
    steps, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < seconds and decoding.engine.has_work:
        decoding.engine.step()
        steps += 1
    return steps * batch / took


def fair_share(threads: int, others: int, cores: int) -> float:
    """Of the speed alone, if every thread that wants a core gets as much of them."""
    alone = min(1.0, cores / threads)
    return min(1.0, cores / (threads + others)) / alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--others", type=int, default=os.cpu_count() or 1, help="processes that count")
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--activations", default="fp32")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of decoding, each")
    parser.add_argument("--model", default=None)
    args = parser.parse_args()
    loaded = load(
        args.model,
        device="cpu",
        threads=args.threads,
        activations=args.activations,
        cache_dir=Path(default_cache_dir()),
    )
    fair = fair_share(args.threads, args.others, os.cpu_count() or 1)
    table = Table("batch", "alone, tok/s", f"beside {args.others} others", "left", "fair share", "of it")
    for batch in map(int, args.batch.split(",")):
        alone, beside = [], []
        for _ in range(args.rounds):
            alone.append(tokens_per_s(loaded, batch, args.seconds))
            with busy(args.others):
                beside.append(tokens_per_s(loaded, batch, args.seconds))
        left = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
        speeds = (f"{statistics.median(found):.1f}" for found in (alone, beside))
        table.add_row(str(batch), *speeds, f"{left:.2f}", f"{fair:.2f}", f"{left / fair:.0%}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

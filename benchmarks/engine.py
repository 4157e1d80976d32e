"""What the engine decides, measured on the model alone: the adaptive budget against a sweep, and prefix hits.

`python -m benchmarks.engine adaptive` compares the controller with every static setting of the sweep, on the
same requests at once. `python -m benchmarks.engine prefix` takes the time to the first token of prompts that
share their first 512 tokens, with the prefix cache and without.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import astuple, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.exact import workload_requests
from headrace.config import default_cache_dir
from headrace.messages import SamplingParams
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.outputs import TokenOutput
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.model.loader import LoadedModel, load
from worker.model.runner import ModelRunner

NUM_BLOCKS = 1456
Setting = tuple[int, int]  # tokens a step, sequences
SWEEP: tuple[Setting, ...] = tuple(
    (tokens, seqs) for tokens in (32, 64, 128, 256, 512) for seqs in (16, 32, 64)
)
LARGEST = SWEEP[-1]
PREFIX_TOKENS, TAIL_TOKENS = 512, 16


@dataclass(frozen=True, slots=True)
class Offline:
    """One run of all requests at once."""

    tokens_per_s: float
    itl_p50_ms: float
    itl_p99_ms: float


class Bench:
    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._runner = ModelRunner(loaded, num_blocks=NUM_BLOCKS, block_size=16)
        self._run = 0

    def engine(self, **config: object) -> Engine:
        settings = EngineConfig(num_blocks=NUM_BLOCKS, max_model_len=self.loaded.max_model_len, **config)  # type: ignore[arg-type]
        return Engine(Scheduler(settings), self._runner, time.monotonic)

    def request(self, name: str, prompt_ids: list[int], max_tokens: int) -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Request(name, prompt_ids, params, 1)

    def offline(self, engine: Engine) -> Offline:
        self._run += 1
        for n, (prompt_ids, length) in enumerate(workload_requests()):
            engine.add(self.request(f"{self._run}-{n}", prompt_ids, length))
        last_s: dict[str, float] = {}
        gaps_s: list[float] = []
        tokens, start_s = 0, time.perf_counter()
        while engine.has_work:
            outputs = engine.step()
            now_s = time.perf_counter()
            for output in outputs:
                if isinstance(output, TokenOutput):
                    tokens += 1
                    if output.request_id in last_s:
                        gaps_s.append(now_s - last_s[output.request_id])
                    last_s[output.request_id] = now_s
        quantiles = statistics.quantiles(gaps_s, n=100)
        wall_s = time.perf_counter() - start_s
        return Offline(tokens / wall_s, quantiles[49] * 1e3, quantiles[98] * 1e3)

    def first_token_s(self, engine: Engine, name: str, prompt_ids: list[int]) -> float:
        engine.add(self.request(name, prompt_ids, 1))
        start_s = time.perf_counter()
        while engine.has_work:
            engine.step()
        return time.perf_counter() - start_s


def adaptive(bench: Bench, console: Console, target_itl_ms: float, rounds: int) -> None:
    """The sweep once, to find its best; then its best and the controller in turn, each first in its turn:
    the best of fifteen single runs would owe some of its lead to a lucky moment of the machine."""
    sweep = {setting: bench.offline(bench.engine(prefix_cache=False, **fields(setting))) for setting in SWEEP}
    table = Table("setting", "tok/s", "ITL p50, ms", "ITL p99, ms", title="the sweep, one run each")
    for setting, run in sweep.items():
        add_row(table, name_of(setting), run)
    console.print(table)
    fastest = max(sweep, key=lambda setting: sweep[setting].tokens_per_s)
    within = [setting for setting, run in sweep.items() if run.itl_p99_ms <= target_itl_ms]
    compare(bench, console, rounds, fastest, "adaptive, throughput", None)
    if not within:
        console.print(f"no setting of the sweep keeps {target_itl_ms:.0f} ms at p99")
        return
    best = max(within, key=lambda setting: sweep[setting].tokens_per_s)
    compare(bench, console, rounds, best, f"adaptive, {target_itl_ms:.0f} ms", target_itl_ms)


def compare(
    bench: Bench, console: Console, rounds: int, best: Setting, name: str, target_itl_ms: float | None
) -> None:
    """Prints the medians of `rounds` runs of one static setting and of the controller, and their ratio."""
    forms: dict[str, dict[str, object]] = {
        name_of(best): fields(best),
        name: {"adaptive": True, "target_itl_ms": target_itl_ms, **fields(LARGEST)},
    }
    runs: dict[str, list[Offline]] = {form: [] for form in forms}
    for number in range(rounds):
        for form in list(forms) if number % 2 else reversed(forms):
            runs[form].append(bench.offline(bench.engine(prefix_cache=False, **forms[form])))
    table = Table("setting", "tok/s", "ITL p50, ms", "ITL p99, ms", title=f"in turn, medians of {rounds}")
    medians = {form: median_of(of_form) for form, of_form in runs.items()}
    for form, run in medians.items():
        add_row(table, form, run)
    console.print(table)
    ratio = medians[name].tokens_per_s / medians[name_of(best)].tokens_per_s
    console.print(f"{name}: {ratio:.2f} of the best static setting")


def fields(setting: Setting) -> dict[str, object]:
    return {"max_num_batched_tokens": setting[0], "max_num_seqs": setting[1]}


def name_of(setting: Setting) -> str:
    return f"static {setting[0]} tokens, {setting[1]} sequences"


def median_of(runs: list[Offline]) -> Offline:
    return Offline(*(statistics.median(values) for values in zip(*map(astuple, runs), strict=True)))


def add_row(table: Table, name: str, run: Offline) -> None:
    table.add_row(name, f"{run.tokens_per_s:.1f}", f"{run.itl_p50_ms:.1f}", f"{run.itl_p99_ms:.1f}")


def prefix(bench: Bench, console: Console, samples: int) -> None:
    rng = random.Random(3)
    vocabulary = bench.loaded.tokenizer_vocab_size

    def some(count: int) -> list[int]:
        return [rng.randrange(100, vocabulary) for _ in range(count)]

    head = some(PREFIX_TOKENS)
    medians = {}
    for cached in (False, True):
        engine = bench.engine(max_num_batched_tokens=256, prefix_cache=cached)
        bench.first_token_s(engine, "warm", head + some(TAIL_TOKENS))
        times = [
            bench.first_token_s(engine, f"{cached}-{n}", head + some(TAIL_TOKENS)) for n in range(samples)
        ]
        medians[cached] = statistics.median(times)
        console.print(
            f"prefix cache {'on' if cached else 'off'}: first token after {medians[cached] * 1e3:.1f} ms"
        )
    console.print(
        f"{medians[False] / medians[True]:.1f} times faster on a shared prefix of {PREFIX_TOKENS} tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("adaptive", "prefix"))
    parser.add_argument("--target-itl-ms", type=float, default=150.0)
    parser.add_argument("--samples", type=int, default=9, help="prefix: prompts each way")
    parser.add_argument("--rounds", type=int, default=3, help="adaptive: runs of each, beside the best")
    parser.add_argument("--model", default=None)
    args = parser.parse_args()
    bench = Bench(load(args.model, device="cpu", cache_dir=Path(default_cache_dir())))
    console = Console(width=110)
    if args.what == "adaptive":
        adaptive(bench, console, args.target_itl_ms, args.rounds)
    else:
        prefix(bench, console, args.samples)


if __name__ == "__main__":
    main()

"""The proof of exactness: random jobs alone, then in every kind of crowd, compared bit for bit.

`make exact` (or `python -m benchmarks.exact --jobs 200`). Each round runs all jobs through one engine with
another combination of KV size, prefix cache, chunk size, batch size, guesses and threads, random arrivals
and random neighbours that are cut off; every token and log-probability must be that of the job alone.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from headrace.messages import SamplingParams
from worker.engine.budget import FixedBudget
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.outputs import FailedOutput, TokenOutput
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.engine.stats import EngineStats
from worker.model.loader import LoadedModel, load
from worker.model.runner import ModelRunner

BLOCK_SIZE = 16
EAGER = 1e6  # tokens that a step is said to cost beside its own: every guess is worth its row
Spoken = dict[tuple[str, int], list[tuple[int, float, tuple[tuple[int, float], ...]]]]


@dataclass(frozen=True, slots=True)
class Round:
    num_blocks: int
    prefix_cache: bool
    chunk: int
    max_num_seqs: int
    threads: int
    guesses: int = 0  # most tokens guessed ahead


ROUNDS = (
    Round(4096, False, 512, 33, 2),
    Round(4096, True, 256, 16, 2, 8),
    Round(4096, True, 64, 8, 1, 3),
    Round(28, False, 16, 8, 2, 8),
    Round(30, True, 7, 5, 1),
    Round(24, True, 33, 8, 2, 2),
    Round(64, True, 1, 2, 2),
    Round(64, True, 32, 1, 2, 8),
    Round(40, True, 128, 16, 2),
)


def workload_requests() -> list[tuple[list[int], int]]:
    """Prompt ids and forced output length of each request of the workload."""
    requests = json.loads((Path(__file__).parent / "workload.json").read_text())["requests"]
    return [(r["prompt_ids"], r["output_len"]) for r in requests]


def make_jobs(count: int, loaded: LoadedModel, rng: random.Random) -> list[Request]:
    prompts = [ids for ids, _ in workload_requests()]
    heads = [ids[:64] for ids in prompts if len(ids) >= 64][:3]
    jobs = []
    for n in range(count):
        body = rng.choice(prompts)
        prompt = (rng.choice(heads) if rng.random() < 0.4 else []) + body[: rng.randint(1, len(body))]
        request = Request(
            f"job-{n}", prompt[:300], make_params(rng), rng.getrandbits(62), eos_ids=loaded.eos_ids
        )
        jobs.append(request)
    return jobs


def make_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.randint(1, 40)
    greedy = rng.random() < 0.3
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, max_tokens // 2)),
        temperature=0.0 if greedy else rng.choice((0.3, 0.8, 1.0, 1.7)),
        top_p=rng.choice((1.0, 1.0, 0.9, 0.5)),
        top_k=rng.choice((0, 0, 5, 50)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        n=rng.choice((1, 1, 1, 2, 3)),
        logprobs=rng.choice((0, 1, 5)),
        presence_penalty=rng.choice((0.0, 0.0, 0.8)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        logit_bias=rng.choice(({}, {}, {28: 3.0, 30: -4.0})),
        ignore_eos=rng.random() < 0.3,
    )


class Runs:
    """Runs jobs on engines over one loaded model, each with a fresh KV cache."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def engine(self, r: Round) -> Engine:
        runner = ModelRunner(self._loaded, num_blocks=r.num_blocks, block_size=BLOCK_SIZE, warm_up=False)
        config = EngineConfig(
            num_blocks=r.num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=self._loaded.max_model_len,
            max_num_seqs=r.max_num_seqs,
            max_num_batched_tokens=r.chunk,
            prefix_cache=r.prefix_cache,
            speculative_tokens=r.guesses,
        )
        budget = FixedBudget(r.chunk, r.max_num_seqs, EAGER)
        return Engine(Scheduler(config, budget), runner, time.monotonic)

    def alone(self, jobs: list[Request]) -> Spoken:
        torch.set_num_threads(2)
        spoken: Spoken = defaultdict(list)
        engine = self.engine(Round(1024, False, 512, 8, 2))
        for job in jobs:
            engine.add(job)
            while engine.has_work:
                listen(engine, spoken)
        return spoken

    def crowded(self, jobs: list[Request], r: Round, rng: random.Random) -> tuple[Spoken, EngineStats]:
        torch.set_num_threads(r.threads)  # the compiled kernels follow
        spoken: Spoken = defaultdict(list)
        engine = self.engine(r)
        waiting = rng.sample(jobs, len(jobs))
        strangers = 0
        while waiting or engine.has_work:
            for _ in range(rng.randint(0, 3)):
                if waiting:
                    engine.add(waiting.pop())
            if waiting and rng.random() < 0.05:  # a neighbour that is cut off some steps later
                strangers += 1
                job = rng.choice(jobs)
                stranger = Request(f"x-{strangers}", job.prompt_ids, job.params, 1, eos_ids=job.eos_ids)
                engine.add(stranger)
            if strangers and rng.random() < 0.2:
                engine.abort(f"x-{rng.randint(1, strangers)}")
            listen(engine, spoken)
            if not waiting:
                for n in range(strangers):
                    engine.abort(f"x-{n + 1}")
        engine.scheduler.check_integrity()
        return spoken, engine.stats()


def listen(engine: Engine, spoken: Spoken) -> None:
    for output in engine.step():
        if isinstance(output, FailedOutput) and not output.request_id.startswith("x-"):
            raise output.error
        if isinstance(output, TokenOutput) and output.scored is not None:
            line = (output.token_id, output.scored.logprob, output.scored.top)
            spoken[output.request_id, output.choice].append(line)


def differences(alone: Spoken, crowd: Spoken) -> int:
    return sum(crowd.get(key) != said for key, said in alone.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default=None)
    parser.add_argument("--activations", default="fp32", choices=("fp32", "int8"))
    args = parser.parse_args()
    console, rng = Console(), random.Random(args.seed)
    loaded = load(
        args.model, device="cpu", activations=args.activations, cache_dir=Path.home() / ".cache" / "headrace"
    )
    runs, jobs = Runs(loaded), make_jobs(args.jobs, loaded, rng)
    alone = runs.alone(jobs)
    tokens = sum(len(said) for said in alone.values())
    console.print(
        f"{len(jobs)} jobs alone: {len(alone)} answers, {tokens} tokens, fingerprint {loaded.fingerprint}"
    )
    told = ("preemptions", "guesses right", "of", "tokens", "different")
    table = Table("KV blocks", "prefix cache", "chunk", "sequences", "threads", *told)
    bad = 0
    for r in ROUNDS:
        crowd, stats = runs.crowded(jobs, r, rng)
        found = differences(alone, crowd)
        bad += found
        setting = (r.num_blocks, r.prefix_cache, r.chunk, r.max_num_seqs, r.threads)
        counts = (stats.preemptions, stats.right_guesses, stats.guessed_tokens, tokens, found)
        table.add_row(*map(str, (*setting, *counts)))
    console.print(table)
    console.print(f"{bad} differences in {len(ROUNDS) * len(alone)} answers ({len(ROUNDS) * tokens} tokens)")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())

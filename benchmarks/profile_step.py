"""Where the time of a decode step goes: inside the compiled call part by part, and around it.

    python -m benchmarks.profile_step [--batch 1,32] [--activations fp32,int8] [--seconds 1] [--context 64]

Sequences of the real model, greedy, all decoding. Medians over the steps. Text, events and the arguments of
`emit` are made on the worker's event loop, beside the engine's thread; here in turn, to see their size.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.kernels import Bench, Limits
from headrace.config import default_cache_dir
from headrace.keys import Keys
from headrace.messages import Job, SamplingParams
from headrace.script_calls import emit_call
from headrace_kernels.decoder_step import PARTS, CompiledDecoder, StepTimes
from headrace_kernels.dispatch import resolve
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.model import runner as runner_module
from worker.model.compiled import CompiledModel
from worker.model.loader import LoadedModel, load
from worker.model.runner import ModelRunner
from worker.queue.job import ChoiceState, RunningJob
from worker.text.codec import TextCodec, load_tokenizer
from worker.text.stream import TextStream

PRODUCTS = {"query, key, value", "attention output", "gate, up, activation", "down", "head"}
AROUND = ("schedule", "inputs", "call", "sample", "apply")
BESIDE = ("text and events", "emit's arguments")
WHOLE = "whole step"
HOUR_MS = 3_600_000
WARM_UP_STEPS = 5


class StepProfile:
    """Milliseconds of each part, step by step."""

    def __init__(self) -> None:
        self.steps: dict[str, list[float]] = defaultdict(list)
        self.whole: list[float] = []
        self._now: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._now[name] += (time.perf_counter() - started) * 1e3

    @contextmanager
    def timed(self, owner: Any, attribute: str, name: str) -> Iterator[None]:
        """What calls of owner.attribute take counts as `name`."""
        original = getattr(owner, attribute)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return original(*args, **kwargs)

        setattr(owner, attribute, wrapped)
        try:
            yield
        finally:
            setattr(owner, attribute, original)

    def end_step(self, whole_ms: float, inside: dict[str, float]) -> None:
        self._now.update(inside)
        self._now["call"] -= sum(inside.values())
        self.whole.append(whole_ms)
        for name in (*PARTS, *AROUND, *BESIDE):
            self.steps[name].append(self._now[name])
        self._now.clear()

    def typical(self, quantile: float) -> dict[str, float]:
        """Of each part, and of the whole step."""
        return {
            name: _quantile(found, quantile) for name, found in [*self.steps.items(), (WHOLE, self.whole)]
        }


def _quantile(values: list[float], quantile: float) -> float:
    return sorted(values)[min(len(values) - 1, int(quantile * len(values)))]


class Decoding:
    """`batch` sequences of one model in the middle of their answers."""

    def __init__(self, loaded: LoadedModel, codec: TextCodec, batch: int, context: int, tokens: int) -> None:
        blocks = batch * -(-(context + tokens + 1) // 16) + 1
        runner = ModelRunner(loaded, num_blocks=blocks, block_size=16)
        config = EngineConfig(
            num_blocks=blocks, max_model_len=loaded.max_model_len, max_num_seqs=batch, prefix_cache=False
        )
        self.engine = Engine(Scheduler(config), runner, time.monotonic)
        self.runner = runner
        self.jobs: dict[str, RunningJob] = {}
        for number in range(batch):
            self._add(str(number), [100 + 7 * number + i for i in range(context)], tokens, codec)

    def _add(self, name: str, prompt: list[int], tokens: int, codec: TextCodec) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.engine.add(Request(name, prompt, params, 1))
        job = Job(id=name, pool="profile", job_class="normal", entry_id="1-1", params=params)
        self.jobs[name] = RunningJob(
            job,
            epoch=1,
            last_seq=0,
            codec=codec,
            prompt_ids=prompt,
            choices=[ChoiceState(0, TextStream(codec, prompt, params))],
            seed=1,
            fingerprint="",
            model_name="",
        )

    def warm_up(self) -> None:
        """Until all decode."""
        while len(self.engine.step()) < len(self.jobs):
            pass
        for _ in range(WARM_UP_STEPS):
            self.engine.step()

    def profile(self, seconds: float) -> StepProfile:
        found = StepProfile()
        self.warm_up()
        decoder = _decoder(self.runner)
        with ExitStack() as patches:
            for owner, attribute, name in self._watched():
                patches.enter_context(found.timed(owner, attribute, name))
            ends = time.perf_counter() + seconds
            while time.perf_counter() < ends and self.engine.has_work:
                self._step(found, decoder)
        decoder.times = None
        return found

    def _watched(self) -> list[tuple[Any, str, str]]:
        return [
            (self.engine.scheduler, "plan", "schedule"),
            (runner_module, "build_inputs", "inputs"),
            (self.runner.forward, "logits", "call"),
            (self.runner.sampler, "sample", "sample"),
            (self.engine.scheduler, "apply", "apply"),
        ]

    def _step(self, found: StepProfile, decoder: CompiledDecoder) -> None:
        times = decoder.times = StepTimes()
        started = time.perf_counter()
        outputs = self.engine.step()
        whole_ms = (time.perf_counter() - started) * 1e3
        with found.part("text and events"):
            for output in outputs:
                self.jobs[output.request_id].absorb(output)
            items = [item for job in self.jobs.values() if (item := job.take()) is not None]
        with found.part("emit's arguments"):
            emit_call(Keys("profile"), items, HOUR_MS)
        found.end_step(whole_ms, times.milliseconds())


def _decoder(runner: ModelRunner) -> CompiledDecoder:
    if not isinstance(runner.forward, CompiledModel):
        raise SystemExit("this model is not one compiled call a step here; there is nothing to look into")
    return runner.forward.decoder


def stored_bytes(decoder: CompiledDecoder) -> int:
    """Of all matrices that a step reads."""
    layers = sum(w.nbytes for x in decoder.layers for w in (x.qkv, x.output, x.gate_up, x.down))
    return layers + decoder.head.nbytes


def parameters(decoder: CompiledDecoder) -> int:
    layers = sum(w.n * w.k for x in decoder.layers for w in (x.qkv, x.output, x.gate_up, x.down))
    return layers + decoder.head.n * decoder.head.k


def summary(typical: dict[str, float], decoder: CompiledDecoder, batch: int, limits: Limits) -> str:
    whole = typical[WHOLE]
    products = sum(typical[name] for name in PRODUCTS)
    rest = whole - products - typical["attention"]
    reading_ms = stored_bytes(decoder) / limits.gbytes / 1e6
    arithmetic_ms = 2 * parameters(decoder) * batch / limits.gflops / 1e6
    return (
        f"{batch / whole * 1e3:.0f} tok/s; products {products:.2f} ms; reading the weights once at "
        f"{limits.gbytes:.1f} GB/s {reading_ms:.2f} ms ({reading_ms / whole:.0%} of the step); "
        f"fp32 arithmetic at {limits.gflops:.0f} GFLOP/s {arithmetic_ms:.2f} ms "
        f"({arithmetic_ms / products:.0%} of the products); "
        f"neither product nor attention {rest:.2f} ms ({rest / whole:.0%})"
    )


def table(columns: dict[str, dict[str, float]]) -> Table:
    shown = Table("part", *(f"{name}, ms" for name in columns))
    for part in (*PARTS, *AROUND, WHOLE, *BESIDE):
        cells = (f"{found[part]:.3f} ({found[part] / found[WHOLE]:.0%})" for found in columns.values())
        shown.add_row(part, *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--activations", default="fp32,int8")
    parser.add_argument("--seconds", type=float, default=1.0, help="of decoding, each")
    parser.add_argument("--context", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quantile", type=float, default=0.5, help="lower on a machine with other work")
    parser.add_argument("--model", default=None)
    args = parser.parse_args()
    console = Console(width=140)
    columns: dict[str, dict[str, float]] = {}
    on = resolve("cpu")
    on.library.hr_set_threads(args.threads)
    limits = Bench(on, 0.3).limits
    for activations in args.activations.split(","):
        loaded = load(
            args.model,
            device="cpu",
            threads=args.threads,
            activations=activations,
            cache_dir=Path(default_cache_dir()),
        )
        codec = load_tokenizer(loaded.path)
        for batch in map(int, args.batch.split(",")):
            decoding = Decoding(loaded, codec, batch, args.context, tokens=1000)
            name = f"{activations}, batch {batch}"
            columns[name] = decoding.profile(args.seconds).typical(args.quantile)
            decoder = _decoder(decoding.runner)
            console.print(f"{name}: {summary(columns[name], decoder, batch, limits)}", highlight=False)
    console.print(table(columns))


if __name__ == "__main__":
    main()

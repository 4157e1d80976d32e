"""`python -m benchmarks.gpu [model]`: builds, checks and times the Triton kernels and a model on this card.

Each kernel is compared with its reference, and timed beside the time its memory traffic takes at the
bandwidth measured on the same card. The model is decoded with graphs and without, and by transformers' own
continuous batching. Prints a table in Markdown with the card's name. Says so where there is no card.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

BATCHES = (1, 8, 32, 128)
CONTEXT = 2048
PREFILL = 512
WIDTH, INTERMEDIATE, VOCABULARY = 4096, 11_008, 128_256
DEVICE = "cuda"
DECODE_STEPS = 64
MODEL_BATCHES = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class Timed:
    """One row of the table. `bytes_moved` is what the kernel must read and write at least."""

    name: str
    size: str
    microseconds: float
    bytes_moved: int
    largest_error: float

    def row(self, bytes_per_s: float) -> str:
        limit = self.bytes_moved / bytes_per_s * 1e6
        share = f"{100 * limit / self.microseconds:.0f} %"
        return f"| {self.name} | {self.size} | {self.microseconds:.1f} | {share} | {self.largest_error:.1e} |"


def time_us(run: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=20, rep=100, return_mode="median")) * 1e3


def bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.empty(2**28, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_us(lambda: target.copy_(source)) * 1e6


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def attention(dtype: torch.dtype) -> Iterator[Timed]:
    """Decode at a context of 2,048 tokens, 32 query heads on 8 KV heads of 128, and one prefill of 512."""
    from headrace_kernels.paged_attention import reference
    from headrace_kernels.paged_attention.triton import pack_sequences, paged_attention

    blocks = CONTEXT // 16
    for batch, tokens in (*((b, 1) for b in BATCHES), (1, PREFILL)):
        caches = [torch.randn(batch * blocks, 16, 8, 128, dtype=dtype, device=DEVICE) for _ in range(2)]
        keys, values = caches[0].permute(0, 2, 3, 1), caches[1].permute(0, 2, 1, 3)
        tables = [np.arange(blocks) + i * blocks for i in range(batch)]
        starts, cu = np.full(batch, CONTEXT - tokens), np.arange(batch + 1) * tokens
        sequences = pack_sequences(cu, starts, tables, 16, groups=[4], device=DEVICE)
        query = torch.randn(batch * tokens, 32, 128, dtype=dtype, device=DEVICE)

        run = partial(paged_attention, query, keys, values, sequences, scale=128**-0.5)

        out = run()
        if not torch.equal(run(at_once=False), run(at_once=True)):
            raise SystemExit("attention: the two ways of splitting keys differ in their bits")
        k, v = (c[:blocks].flatten(0, 1).double() for c in caches)
        expected = reference.attend(
            query[:1].double().cpu(), k.cpu(), v.cpu(), CONTEXT - tokens, scale=128**-0.5
        )
        moved = batch * CONTEXT * 8 * 128 * 2 * dtype.itemsize + 2 * query.nbytes
        yield Timed("attention", f"{batch} × {tokens}", time_us(run), moved, _error(out[:1].cpu(), expected))


def products(dtype: torch.dtype) -> Iterator[Timed]:
    from headrace_kernels.matmul.triton import linear

    weight = torch.randn(WIDTH, WIDTH, dtype=dtype, device=DEVICE)
    every = torch.randn(max(BATCHES), WIDTH, dtype=dtype, device=DEVICE)
    whole = linear(every, weight)
    for rows in BATCHES:
        x = every[:rows].contiguous()
        if not torch.equal(linear(x, weight), whole[:rows]):
            raise SystemExit(f"product: {rows} rows differ in their bits from the same among more")
        moved, error = weight.nbytes + 2 * x.nbytes, _error(whole[:rows], x.double() @ weight.double().T)
        yield Timed("product", f"{rows} × {WIDTH}²", time_us(partial(linear, x, weight)), moved, error)
        torch_us = time_us(partial(torch.nn.functional.linear, x, weight))
        yield Timed("product of torch", f"{rows} × {WIDTH}²", torch_us, moved, 0.0)


def rows(dtype: torch.dtype) -> Iterator[Timed]:
    from headrace_kernels import gated_activation, rms_norm
    from headrace_kernels.gated_activation.triton import gated_activation as activate
    from headrace_kernels.rms_norm.triton import rms_norm as norm

    for count in BATCHES:
        x, weight = (torch.randn(n, WIDTH, dtype=dtype, device=DEVICE) for n in (count, 1))
        expected = rms_norm.reference.rms_norm(x.double(), weight[0].double(), 1e-5)
        us = time_us(partial(norm, x, weight[0], 1e-5))
        yield Timed(
            "RMS norm", f"{count} × {WIDTH}", us, 2 * x.nbytes, _error(norm(x, weight[0], 1e-5), expected)
        )
        both = torch.randn(count, 2 * INTERMEDIATE, dtype=dtype, device=DEVICE)
        expected = gated_activation.reference.gated_activation(both.double(), "silu")
        us = time_us(partial(activate, both, "silu"))
        moved, error = both.nbytes * 3 // 2, _error(activate(both, "silu"), expected)
        yield Timed("SiLU · up", f"{count} × {INTERMEDIATE}", us, moved, error)


def sampling() -> Iterator[Timed]:
    """top_k 50 and top_p 0.9 over 128,256 tokens; right if a sort in fp64 keeps each token drawn."""
    from headrace_kernels.sampling.triton import Draws, draw

    for count in BATCHES:
        logits = 3 * torch.randn(count, VOCABULARY, device=DEVICE)
        full = dict(temperature=1.0, top_k=50, top_p=0.9, min_p=0.0)
        types = dict(temperature=torch.float32, top_k=torch.int32, top_p=torch.float64, min_p=torch.float32)
        columns = {n: torch.full((count,), v, dtype=types[n], device=DEVICE) for n, v in full.items()}
        how = Draws(**columns, uniform=torch.rand(count, dtype=torch.float64, device=DEVICE))
        rank = (logits > logits.gather(1, draw(logits, how)[:, None])).sum(-1)
        us = time_us(partial(draw, logits, how))
        yield Timed("draw", f"{count} × {VOCABULARY}", us, logits.nbytes, float((rank >= 50).sum()))


def model_rows(name: str) -> Iterator[str]:
    """Decode of equal prompts: output tokens a second with graphs and without, and of transformers."""
    from worker.model.loader import load
    from worker.model.runner import ModelRunner

    for batch in MODEL_BATCHES:
        for graphs in (True, False):
            loaded = load(name, device="cuda")
            runner = ModelRunner(loaded, num_blocks=batch * 32, block_size=16, graphs=graphs)
            way = f"{loaded.forward.way}, {'graphs' if graphs else 'no graphs'}"
            yield f"| {batch} | {way} | {_decode_rate(runner, batch):.0f} |"
            del runner, loaded
            torch.cuda.empty_cache()
        yield f"| {batch} | transformers' continuous batching | {_transformers_rate(name, batch):.0f} |"


def _decode_rate(runner: Any, batch: int) -> float:
    from headrace.messages import SamplingParams
    from worker.engine.plan import SamplePlan, SequencePlan, StepPlan

    greedy = SamplePlan(SamplingParams(temperature=0.0), 0, 0, 0, (), (), False)
    prompt, started_s = list(range(100, 132)), 0.0
    tables = [list(range(i * 32, i * 32 + 32)) for i in range(batch)]
    for step in range(DECODE_STEPS + 8):
        if step == 8:
            torch.cuda.synchronize()
            started_s = time.perf_counter()
        tokens, start = (prompt, 0) if step == 0 else ([7], len(prompt) + step - 1)
        parts = tuple(SequencePlan(i, tokens, start, tables[i], greedy) for i in range(batch))
        runner.run(StepPlan(step, parts))
    torch.cuda.synchronize()
    return batch * DECODE_STEPS / (time.perf_counter() - started_s)


def _transformers_rate(name: str, batch: int) -> float:
    from transformers import AutoModelForCausalLM, GenerationConfig

    from headrace.models import resolve_model

    model: Any = AutoModelForCausalLM.from_pretrained(
        resolve_model(name, None), dtype="auto", attn_implementation="sdpa_paged"
    )
    model = model.to("cuda").eval()
    length = DECODE_STEPS
    how = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1)
    prompts = [list(range(100, 132)) for _ in range(batch)]
    model.generate_batch(inputs=prompts[:1], generation_config=how, progress_bar=False)
    started_s = time.perf_counter()
    model.generate_batch(inputs=prompts, generation_config=how, progress_bar=False)
    return batch * length / (time.perf_counter() - started_s)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a model folder or id to decode with; none: kernels alone")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu: torch finds no CUDA device here; nothing was built, checked or measured", file=sys.stderr)
        return 1
    dtype, speed = getattr(torch, options.dtype), bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {speed / 1e9:.0f} GB/s of a copy\n")
    print("| kernel | size | µs | of the bandwidth limit | largest error |\n|---|---|---|---|---|")
    with torch.inference_mode():
        for timed in (*attention(dtype), *products(dtype), *rows(dtype), *sampling()):
            print(timed.row(speed), flush=True)
    if options.model:
        print("\n| batch | way | output tok/s |\n|---|---|---|")
        for line in model_rows(options.model):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

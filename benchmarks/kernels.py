"""Every CPU kernel beside its torch reference and the machine's limits, measured in the same run.

    python -m benchmarks.kernels [--threads 2] [--isa avx512|avx2|generic] [--seconds 0.5] [--json FILE]

Products run over all matrices of a SmolLM2-135M (30 layers and the head), so that weights are streamed from
memory as in a real step: a single layer would sit in the cache and flatter. Times are the best of some. The
limits are probed here too: the fp32 peak by a product in the cache, the memory's rate by reading 256 MiB.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace_kernels import gated_activation, matmul, paged_attention, rms_norm, sampling
from headrace_kernels.dispatch import Backend, resolve
from headrace_kernels.matmul.reference import quantize_q4_0, quantize_q4_1, quantize_q8_0

LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = (49_152, 576)
LAYERS = 30
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16
QUANTISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "q8_0": quantize_q8_0,
    "q4_0": quantize_q4_0,
    "q4_1": quantize_q4_1,
}


@dataclass(frozen=True)
class Limits:
    gflops: float
    gbytes: float  # a second


@dataclass(frozen=True)
class Row:
    kernel: str
    case: str
    ms: float
    reference_ms: float | None
    gflops: float
    gbytes: float
    of_limit: float  # the least time that arithmetic and memory permit, over the time taken

    def line(self) -> str:
        faster = f"{self.reference_ms / self.ms:7.1f} x" if self.reference_ms else " " * 9
        return (
            f"{self.kernel:16} {self.case:22} {self.ms:9.3f} ms {faster} "
            f"{self.gflops:7.0f} Gop/s {self.gbytes:6.1f} GB/s {self.of_limit:6.0%} of the limit"
        )


class Bench:
    def __init__(self, on: Backend, seconds: float) -> None:
        self.on, self.seconds = on, seconds
        self.limits = self._probe()

    def best_s(self, run: Callable[[], object]) -> float:
        best, total, count = float("inf"), 0.0, 0
        while count < 3 or (total < self.seconds and count < 200):
            started = time.perf_counter()
            run()
            took = time.perf_counter() - started
            best, total, count = min(best, took), total + took, count + 1
        return best

    def _probe(self) -> Limits:
        packed = matmul.pack(torch.randn(1536, 576), on=self.on)
        x, y = torch.randn(96, 576), torch.empty(96, 1536)
        peak = 2 * 96 * 576 * 1536 / self.best_s(lambda: matmul.linear(x, packed, out=y)) / 1e9
        memory = torch.zeros(64 << 20, dtype=torch.float32)
        rate = memory.nbytes / self.best_s(lambda: memory.sum()) / 1e9
        return Limits(peak, rate)

    def row(
        self,
        kernel: str,
        case: str,
        run: Callable[[], object],
        *,
        operations: float,
        bytes_: float,
        reference: Callable[[], object] | None = None,
        peak: float = 1.0,
    ) -> Row:
        """`peak`: how many times the fp32 peak the arithmetic allows."""
        took = self.best_s(run)
        other = None if reference is None else self.best_s(reference)
        least = max(operations / (self.limits.gflops * peak), bytes_ / self.limits.gbytes) / 1e9
        return Row(
            kernel,
            case,
            took * 1e3,
            None if other is None else other * 1e3,
            operations / took / 1e9,
            bytes_ / took / 1e9,
            least / took,
        )


def products(bench: Bench, storage: str, int8: bool, rows: tuple[int, ...]) -> Iterator[Row]:
    weights = {shape: torch.randn(shape) * 0.05 for shape in (*LAYER, HEAD)}
    model = [(shape, _pack(weights[shape], storage, int8, bench.on)) for shape in [*LAYER * LAYERS, HEAD]]
    plain = {shape: [weights[shape].clone() for _ in range(LAYERS)] for shape in LAYER} | {
        HEAD: [weights[HEAD]]
    }
    operations = sum(2 * n * k for (n, k), _ in model)
    size = sum(packed.nbytes for _, packed in model)
    for count in rows:
        x = {k: torch.randn(count, k) for _, k in (*LAYER, HEAD)}
        y = {n: torch.empty(count, n) for n, _ in (*LAYER, HEAD)}

        def ours(x: dict[int, Tensor] = x, y: dict[int, Tensor] = y) -> None:
            for (n, k), packed in model:
                matmul.linear(x[k], packed, out=y[n])

        def theirs(x: dict[int, Tensor] = x) -> None:
            for (_, k), copies in plain.items():
                for w in copies:
                    torch.nn.functional.linear(x[k], w)

        yield bench.row(
            "product int8" if int8 else "product",
            f"{storage}, {count} rows",
            ours,
            operations=operations * count,
            bytes_=size,
            reference=theirs if storage == "f32" else None,
            peak=4.0 if int8 else 1.0,
        )


def _pack(weight: Tensor, storage: str, int8: bool, on: Backend) -> matmul.PackedWeight:
    if storage in QUANTISERS:
        return matmul.pack_blocks(QUANTISERS[storage](weight), storage, int8_activations=int8, on=on)
    return matmul.pack(weight.to({"f32": torch.float32, "bf16": torch.bfloat16}[storage]), on=on)


def attention(bench: Bench, sequences: int, context: int, tokens: int) -> Row:
    """`tokens` of each sequence, the last of `context`; several layers, so that keys come from memory."""
    blocks = -(-context // BLOCK)
    layers = max(1, min(LAYERS, int(4e8 / (sequences * context * KV_HEADS * HEAD_DIM * 8))))
    caches = [
        (
            torch.randn(sequences * blocks, KV_HEADS, HEAD_DIM, BLOCK),
            torch.randn(sequences * blocks, KV_HEADS, BLOCK, HEAD_DIM),
        )
        for _ in range(layers)
    ]
    query = torch.randn(sequences * tokens, HEADS, HEAD_DIM)
    packed = paged_attention.pack_sequences(
        np.arange(sequences + 1) * tokens,
        np.full(sequences, context - tokens),
        [np.arange(i * blocks, (i + 1) * blocks) for i in range(sequences)],
        BLOCK,
    )

    def ours() -> None:
        for keys, values in caches:
            paged_attention.paged_attention(query, keys, values, packed, scale=0.125, on=bench.on)

    k, v = (torch.randn(sequences, HEADS, context, HEAD_DIM) for _ in range(2))
    asked = query.view(sequences, tokens, HEADS, HEAD_DIM).transpose(1, 2)

    def theirs() -> None:
        for _ in caches:
            torch.nn.functional.scaled_dot_product_attention(asked, k, v)

    seen = context - (tokens - 1) / 2
    return bench.row(
        "attention",
        f"{sequences} x {tokens} of {context}",
        ours,
        operations=4 * sequences * tokens * seen * HEADS * HEAD_DIM * layers,
        bytes_=sequences * context * KV_HEADS * HEAD_DIM * 8 * layers,
        reference=theirs,
    )


def rows_of(bench: Bench, count: int) -> Iterator[Row]:
    on = bench.on
    x, weight = torch.randn(count, 576), torch.randn(576)
    yield bench.row(
        "rms_norm",
        f"{count} rows",
        lambda: rms_norm.rms_norm(x, weight, 1e-5, on=on),
        operations=4 * x.numel(),
        bytes_=2 * x.nbytes,
        reference=lambda: rms_norm.reference.rms_norm(x, weight, 1e-5),
    )
    both = torch.randn(count, 3072)
    yield bench.row(
        "gated_activation",
        f"{count} rows",
        lambda: gated_activation.gated_activation(both, "silu", on=on),
        operations=20 * both.numel() / 2,
        bytes_=1.5 * both.nbytes,
        reference=lambda: gated_activation.reference.gated_activation(both, "silu"),
    )
    logits = torch.randn(count, 49_152)
    yield bench.row(
        "argmax",
        f"{count} rows",
        lambda: sampling.argmax(logits, on=on),
        operations=2 * logits.numel(),
        bytes_=logits.nbytes,
        reference=lambda: sampling.reference.argmax(logits),
    )


def measure(bench: Bench) -> Iterator[Row]:
    for storage in ("f32", "bf16", "q8_0", "q4_1"):
        yield from products(bench, storage, False, (1, 8, 32, 64))
    for storage in ("q8_0", "q4_1"):
        yield from products(bench, storage, True, (1, 8, 32, 64))
    for sequences, context, tokens in ((1, 512, 1), (32, 140, 1), (32, 512, 1), (1, 512, 256)):
        yield attention(bench, sequences, context, tokens)
    for count in (1, 32):
        yield from rows_of(bench, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa")
    parser.add_argument("--seconds", type=float, default=0.5, help="spent on each measurement")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    on = resolve("cpu", isa=arguments.isa)
    on.library.hr_set_threads(arguments.threads)
    bench = Bench(on, arguments.seconds)
    peak, rate = bench.limits.gflops, bench.limits.gbytes
    print(f"{on.isa}, {arguments.threads} threads: {peak:.0f} GFLOP/s fp32, memory {rate:.1f} GB/s")
    found = []
    for row in measure(bench):
        print(row.line(), flush=True)
        found.append(asdict(row))
    if arguments.json:
        report = {"isa": on.isa, "threads": arguments.threads, "limits": asdict(bench.limits), "rows": found}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

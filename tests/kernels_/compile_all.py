"""Compiles every Triton kernel for a card that need not be here; prints each with the size of its code.

Run as a program of its own: the interpreter, once chosen, stays for a process. Launches are replaced by
Triton's warm-up, which compiles and stops.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from headrace_kernels.block_copy import triton as block_copy
from headrace_kernels.gated_activation import triton as gated_activation
from headrace_kernels.matmul import triton as matmul
from headrace_kernels.paged_attention import triton as attention
from headrace_kernels.rms_norm import triton as rms_norm
from headrace_kernels.rotary_kv import triton as rotary_kv
from headrace_kernels.sampling import triton as sampling


class Driver:
    """As much of a card's driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_everything(dtype: torch.dtype) -> None:
    def some(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=of)

    x, caches = some(3, 64), (some(4, 16, 2, 64).permute(0, 2, 3, 1), some(4, 16, 2, 64).permute(0, 2, 1, 3))
    rms_norm.rms_norm(x, some(64), 1e-5, residual=some(3, 64))
    for activation in ("silu", "gelu_tanh", "gelu", "relu"):
        gated_activation.gated_activation(x, activation)
    matmul.linear(x, some(96, 64), some(96), some(3, 96))
    block_copy.copy_blocks([some(4, 16, 2, 64)], [(0, 1)])
    numbers, table = torch.arange(3), torch.zeros(16, 32)
    tables = (table, table)
    byte = [some(4, 16, 2, 64, of=torch.int8), some(4, 16, 2, 64, of=torch.float8_e4m3fn)]
    scales = (torch.zeros(4, 16, 2), torch.zeros(4, 16, 2))
    stores: list[tuple[Any, Any]] = [(caches, None)]
    stores += [((t.permute(0, 2, 3, 1), t.permute(0, 2, 1, 3)), scales) for t in byte]
    sequences = attention.pack_sequences(
        np.array([0, 3]), np.array([40]), [np.arange(3)], 16, groups=[3], device="cpu"
    )
    for store, scale in stores:
        how = rotary_kv.Rotary(*tables, q_norm=some(64), k_norm=some(64), interleaved=scale is None)
        rotary_kv.rotary_kv_write(
            some(3, 640), how, numbers, numbers, store[0], store[1], heads=6, scales=scale
        )
        for at_once in (False, True):
            attention.paged_attention(
                some(3, 6, 64), store[0], store[1], sequences, scale=1.0, window=9, softcap=2.0,
                sinks=torch.zeros(6), scales=scale, at_once=at_once,
            )  # fmt: skip


def compile_sampling() -> None:
    logits = torch.zeros(2, 100)
    sampling.argmax(logits)
    sampling.log_sum_exp(logits)
    types = (torch.float32, torch.int32, torch.float64, torch.float32, torch.float64)
    sampling.draw(logits, sampling.Draws(*(torch.zeros(2, dtype=t) for t in types)))


def main(capability: int, quick: bool) -> None:
    launch = JITFunction.run

    def warm_up(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, warmup=True, **kwargs)
        print(self.fn.__name__, len(kernel.asm["cubin"]), flush=True)
        return kernel

    triton.runtime.driver.set_active(Driver(capability))
    JITFunction.run = warm_up
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16, torch.float32):
        compile_everything(dtype)
    compile_sampling()


if __name__ == "__main__":
    main(int(sys.argv[1]), quick=len(sys.argv) > 2)

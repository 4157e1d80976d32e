"""The cache's tensors: rounding, whole-block copies, memory only where something was written; its size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config import ConfigError, WorkerSettings
from headrace.models import ModelError
from worker.build import num_kv_blocks
from worker.model.kv import KV_DTYPES, KVCache, LayerShape, choose_kv_dtype

LAYERS = (LayerShape(2, 12, 20), LayerShape(3, 8, 8))
CPU = torch.device("cpu")
# Of one element of a unit normal head, relative to the head's largest.
ROUNDING = {"fp32": 0.0, "fp16": 2**-10, "bf16": 2**-8, "int8": 1 / 250, "fp8": 2**-3}


def written(name: str, slots: torch.Tensor) -> tuple[KVCache, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    cache = KVCache(LAYERS, 6, 4, KV_DTYPES[name])
    for number, layer in enumerate(LAYERS):
        key = torch.randn(len(slots), layer.kv_heads, layer.k_dim, generator=draw)
        value = torch.randn(len(slots), layer.kv_heads, layer.v_dim, generator=draw)
        cache.write(number, slots, key, value)
    return cache, key, value


def rows_of(slots: torch.Tensor, kv_heads: int) -> torch.Tensor:
    return (slots[:, None] * kv_heads + torch.arange(kv_heads)).flatten()


@pytest.mark.parametrize("name", KV_DTYPES)
def test_what_was_written_is_read_rounded(name: str) -> None:
    slots = torch.tensor([9, 0, 23, 5])
    cache, key, value = written(name, slots)
    k, v = cache.read(1, rows_of(slots, 3), torch.float32)
    for x, kept in ((key, k), (value, v)):
        error = (kept.view(x.shape) - x).abs().amax(-1) / x.abs().amax(-1)
        assert float(error.max()) <= ROUNDING[name]
        assert name == "fp32" or float(error.max()) > 0


@pytest.mark.parametrize("name", KV_DTYPES)
def test_copied_blocks_are_equal_and_cleared_blocks_zero(name: str) -> None:
    """Scales go with the bytes: a fork's copy of a block reads as the block it came from."""
    cache, _, _ = written(name, torch.arange(24))
    wanted = [cache.read(1, rows_of(torch.arange(b * 4, b * 4 + 4), 3), torch.float32)[0] for b in range(6)]
    cache.copy_blocks([(0, 3), (1, 0)])
    got = [cache.read(1, rows_of(torch.arange(b * 4, b * 4 + 4), 3), torch.float32)[0] for b in range(6)]
    for block, source in enumerate((1, 1, 2, 0, 4, 5)):
        assert torch.equal(got[block], wanted[source])
    cache.clear_blocks(np.array([2, 4]))
    again = cache.read(1, rows_of(torch.arange(24), 3), torch.float32)[0].view(6, -1)
    assert [bool(block.any()) for block in again] == [True, True, False, True, False, True]


def test_memory_is_taken_when_blocks_are_written() -> None:
    before = resident_bytes()
    layer = LayerShape(3, 64, 64)
    cache = KVCache([layer] * 4, 4096, 16)
    size = 4 * 4096 * 16 * layer.bytes_per_token(torch.float32)
    assert size > 256 << 20
    assert resident_bytes() - before < 16 << 20
    slots = torch.arange(16 * 1024)
    x = torch.ones(len(slots), 3, 64)
    for number in range(4):
        cache.write(number, slots, x, x)
    grown = resident_bytes() - before
    assert size // 4 <= grown < size // 4 + (48 << 20)


def resident_bytes() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def test_bytes_of_a_token() -> None:
    layer = LayerShape(3, 64, 64)
    assert [layer.bytes_per_token(t) for t in KV_DTYPES.values()] == [1536, 768, 768, 408, 408]


def test_automatic_types() -> None:
    assert choose_kv_dtype("auto", torch.float32, CPU) == torch.float32
    assert choose_kv_dtype("auto", torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    assert choose_kv_dtype("auto", torch.float32, CPU, int8_activations=True) == torch.int8
    assert choose_kv_dtype("fp16", torch.float32, CPU, int8_activations=True) == torch.float16
    assert choose_kv_dtype("fp8", torch.bfloat16, torch.device("cuda")) == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("name", "arithmetic", "device", "told"),
    [
        ("int4", torch.float32, "cpu", "kv_dtype 'int4'"),
        ("fp8", torch.float32, "cpu", "on the CPU give int8"),
        ("fp16", torch.bfloat16, "cuda", "keeps that"),
    ],
)
def test_types_that_do_not_fit_are_refused(
    name: str, arithmetic: torch.dtype, device: str, told: str
) -> None:
    with pytest.raises(ModelError, match=told):
        choose_kv_dtype(name, arithmetic, torch.device(device))


def loaded(bytes_per_token: int = 46_080, max_model_len: int = 8192) -> Any:
    return SimpleNamespace(
        kv_bytes_per_token=bytes_per_token,
        max_model_len=max_model_len,
        device=CPU,
        kv_dtype=torch.float32,
    )


def test_the_cache_has_room_for_the_batch_and_for_one_whole_context() -> None:
    assert num_kv_blocks(WorkerSettings(), loaded()) == 16_384 // 16
    assert num_kv_blocks(WorkerSettings(max_num_seqs=4), loaded()) == 8192 // 16
    assert num_kv_blocks(WorkerSettings(max_num_seqs=4, block_size=48), loaded()) == -(-8192 // 48)


def test_the_cache_never_takes_more_than_half_of_free_memory_by_itself() -> None:
    blocks = num_kv_blocks(WorkerSettings(), loaded(bytes_per_token=1 << 22))
    assert 0.4 * available_bytes() < blocks * 16 << 22 < 0.6 * available_bytes()


def available_bytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def test_sizes_and_shares_as_asked_for() -> None:
    assert num_kv_blocks(WorkerSettings(kv_memory="90MiB"), loaded()) == 90 * 2**20 // (46_080 * 16)
    assert num_kv_blocks(WorkerSettings(num_kv_blocks=7, kv_memory="1%"), loaded()) == 7
    share = num_kv_blocks(WorkerSettings(kv_memory="10%"), loaded()) * 46_080 * 16
    assert 0.08 * available_bytes() < share < 0.12 * available_bytes()
    with pytest.raises(ConfigError, match="HEADRACE_KV_MEMORY=1KiB: a block of 16 tokens takes 737280 bytes"):
        num_kv_blocks(WorkerSettings(kv_memory="1KiB"), loaded())

"""The benchmark of a card: what it does without one, and its rows at sizes that the interpreter can do."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

from benchmarks import gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 1
    assert "no CUDA device" in capsys.readouterr().err


def test_rows_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")

    def once(run: Callable[[], Any]) -> float:
        run()
        return 100.0

    small = dict(BATCHES=(1, 3), CONTEXT=48, PREFILL=5, WIDTH=64, INTERMEDIATE=40, VOCABULARY=300)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in dict(**small, DEVICE=device, time_us=once).items():
        monkeypatch.setattr(gpu, name, value)
    makers = (gpu.attention, gpu.products, gpu.rows)
    timed = [t for make in makers for t in make(torch.float32)]
    assert all(t.largest_error < 1e-4 for t in timed)
    assert [t.largest_error for t in gpu.sampling()] == [0.0, 0.0]
    assert {t.name for t in timed} == {"attention", "product", "product of torch", "RMS norm", "SiLU · up"}
    assert gpu.Timed("x", "1", 100.0, 50_000, 0.0).row(1e9) == "| x | 1 | 100.0 | 50 % | 0.0e+00 |"

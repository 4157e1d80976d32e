"""Every Triton kernel compiles to machine code for a card that is not here; whether it is right is unseen."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_all.py")
KERNELS = {"attend", "merge_splits", "_rotary_kv", "_rms_norm", "_gated", "_linear", "_copy", "_draw"}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.timeout(400)
def test_kernels_compile_for_a_card_of_capability_9() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    kernels = PROGRAM.parents[2] / "kernels"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "90", "quick"],
        env={**environment, "PYTHONPATH": str(kernels)},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = dict(line.split() for line in done.stdout.splitlines())
    assert set(sizes) >= KERNELS

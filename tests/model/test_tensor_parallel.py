"""Two processes with half a model each, over gloo, give the logits of the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

PROGRAM = Path(__file__).with_name("tensor_parallel_rank.py")
ROOT = PROGRAM.parents[2]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_processes_give_the_logits_of_one(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(tmp_path / "meeting")],
            env={**os.environ, "PYTHONPATH": paths, "HEADRACE_KERNELS": "torch"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for process, (out, errors) in [(p, p.communicate(timeout=100)) for p in ranks]:
        assert process.returncode == 0, errors[-2000:]
        error, exact = out.splitlines()[-1].split()
        assert float(error) < 1e-5
        assert exact == "True"

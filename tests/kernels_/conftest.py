"""Every instruction set this machine runs, each with its own compiled library."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

from headrace_kernels.dispatch import Backend, BackendError, resolve
from headrace_kernels.native.build import find_compiler, runnable_isas

ISAS = runnable_isas() if find_compiler() else []


@pytest.fixture(scope="session", params=ISAS or ["none"])
def cpu(request: pytest.FixtureRequest) -> Backend:
    """The compiled kernels for one instruction set, on two threads."""
    if request.param == "none":
        pytest.skip("no C++ compiler")
    chosen = resolve("cpu", isa=request.param)
    assert chosen.native is not None
    chosen.native.hr_set_threads(2)
    return chosen


@pytest.fixture(scope="session")
def every_cpu() -> list[Backend]:
    """All of them, to be compared with one another."""
    try:
        found = [resolve("cpu", isa=isa) for isa in ISAS]
    except BackendError as error:
        pytest.skip(str(error))
    if len(found) < 2:
        pytest.skip("one instruction set only")
    return found


@pytest.fixture
def draw() -> torch.Generator:
    return torch.Generator().manual_seed(20_240_817)

"""One switch for all kernels: HEADRACE_KERNELS=auto|torch|cpu|triton, resolved once.

`auto` is Triton on a CUDA device, else the compiled CPU kernels, else torch. A backend asked for by name that
cannot run is an error, never a silent replacement.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import structlog
import torch

from .native import library
from .native.build import BuildError, runnable_isas

NAMES = ("auto", "torch", "cpu", "triton")
# Raised whenever any kernel's bits change: workers with different numbers are not interchangeable mid-answer.
NUMERICS_VERSION = 1


class BackendError(RuntimeError):
    """HEADRACE_KERNELS names a backend that is unknown or cannot run here."""


@dataclass(frozen=True, slots=True)
class Backend:
    """`native` is the compiled library for `cpu`, else None."""

    name: str  # "torch", "cpu" or "triton"
    isa: str  # "avx512", "avx2", "generic"; "" for torch and triton
    native: ctypes.CDLL | None

    @property
    def library(self) -> ctypes.CDLL:
        """The compiled library, for code that needs it. Raises BackendError where there is none."""
        if self.native is None:
            raise BackendError(f"backend {self.name!r} has no compiled kernels")
        return self.native

    @property
    def numerics(self) -> str:
        """Part of a worker's fingerprint. The instruction set is not: it does not change bits."""
        return f"{self.name}-{NUMERICS_VERSION}"


def resolve(name: str, *, isa: str | None = None) -> Backend:
    """The backend called `name`; `isa` chooses among those this machine runs. Raises BackendError."""
    if name not in NAMES:
        raise BackendError(f"HEADRACE_KERNELS={name!r} is none of {', '.join(NAMES)}")
    if name == "torch":
        return Backend("torch", "", None)
    if name == "triton" or (name == "auto" and _triton_runs()):
        return _triton()
    try:
        return _cpu(isa)
    except BuildError as error:
        if name == "cpu":
            raise BackendError(f"HEADRACE_KERNELS=cpu: {error}") from error
        structlog.get_logger().warning(
            "kernels_not_compiled", reason=str(error).splitlines()[0], using="torch"
        )
        return Backend("torch", "", None)


def _cpu(isa: str | None) -> Backend:
    runnable = runnable_isas()
    chosen = isa or runnable[0]
    if chosen not in runnable:
        raise BackendError(f"this machine does not run {chosen!r}, only {', '.join(runnable)}")
    return Backend("cpu", chosen, library.load(chosen))


def _triton_runs() -> bool:
    return torch.cuda.is_available() and find_spec("triton") is not None


def _triton() -> Backend:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if find_spec("triton") is None or not (interpreted or torch.cuda.is_available()):
        raise BackendError("HEADRACE_KERNELS=triton: needs the triton package and a CUDA device")
    return Backend("triton", "", None)


@cache
def backend() -> Backend:
    """The process's backend, from the environment, logged when it is first asked for."""
    chosen = resolve(_requested(os.environ))
    structlog.get_logger().info("kernels", backend=chosen.name, isa=chosen.isa)
    return chosen


def _requested(env: Mapping[str, str]) -> str:
    return env.get("HEADRACE_KERNELS") or "auto"


def set_threads(count: int) -> None:
    """Threads of the compiled kernels, the caller's included; can be changed between calls."""
    if count < 1:
        raise ValueError(f"threads must be at least 1, not {count}")
    native = backend().native
    if native is not None:
        native.hr_set_threads(count)

"""Compiles the C++ sources with the machine's own compiler, once for each compiler and instruction set.

The result is a plain shared library with a C interface: no torch headers, so that it takes seconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # products are fused only where the source says so: the same bits everywhere
)
X86_V3 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
ISA_FLAGS: Mapping[str, tuple[str, ...]] = {
    "avx512": (*X86_V3, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
    "avx2": X86_V3,
    "generic": ("-O2", "-ftree-vectorize"),  # -O3 unrolls library calls for a minute and gains nothing
}
NEEDED_CPU_FLAGS: Mapping[str, frozenset[str]] = {
    "avx512": frozenset(
        {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx2", "fma", "f16c"}
    ),
    "avx2": frozenset({"avx2", "fma", "f16c", "bmi2"}),
    "generic": frozenset(),
}
COMPILE_TIMEOUT_S = 300


class BuildError(RuntimeError):
    """There is no compiler, or it refused the sources."""


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this machine, as Linux names them; empty where that cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def runnable_isas(flags: frozenset[str] | None = None) -> list[str]:
    """What this machine can run, best first; "generic" is always the last."""
    present = cpu_flags() if flags is None else flags
    return [isa for isa, needed in NEEDED_CPU_FLAGS.items() if needed <= present]


def find_compiler(env: Mapping[str, str] = os.environ) -> str | None:
    names = (env["CXX"],) if env.get("CXX") else ("g++", "clang++", "c++")
    return next((path for name in names if (path := shutil.which(name))), None)


def cache_directory(env: Mapping[str, str] = os.environ) -> Path:
    root = env.get("HEADRACE_CACHE_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "headrace") / "kernels"


def sources() -> list[Path]:
    return sorted(PACKAGE.glob("*/*.cpp"))


def build(isa: str, *, env: Mapping[str, str] = os.environ) -> Path:
    """The path of the library for `isa`, compiled if that was not done before. Raises BuildError."""
    compiler = find_compiler(env)
    if compiler is None:
        raise BuildError("no C++ compiler found (set CXX, or install g++ or clang++)")
    flags = (*COMMON_FLAGS, *ISA_FLAGS[isa])
    directory = _writable(cache_directory(env))
    target = directory / f"headrace-{isa}-{_fingerprint(compiler, flags)}.so"
    if target.exists():
        return target
    with _locked(directory / "build.lock"):
        if not target.exists():
            _compile(compiler, flags, target)
    return target


def _writable(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            return directory
    except OSError:
        pass
    # A read-only home must not cost the kernels; the next start compiles again.
    return Path(tempfile.mkdtemp(prefix="headrace-kernels-"))


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_TIMEOUT_S)
    digest.update(version.stdout)
    digest.update(repr((flags, platform.machine(), platform.system())).encode())
    for path in sorted([*PACKAGE.glob("*/*.cpp"), *PACKAGE.glob("*/*.h")]):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [Path(scratch) / f"{path.parent.name}-{path.stem}.o" for path in sources()]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(out)]
            for source, out in zip(sources(), objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        library = Path(scratch) / target.name
        _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library)])
        os.replace(library, target)  # whoever looks sees nothing or all of it


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")

"""One switch, loud when it cannot be obeyed; the compiled library is cached and built once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace_kernels import dispatch
from headrace_kernels.dispatch import BackendError, resolve
from headrace_kernels.native import build
from headrace_kernels.native.build import BuildError

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")


def test_unknown_name_is_an_error() -> None:
    with pytest.raises(BackendError, match="'gpu' is none of auto, torch, cpu, triton"):
        resolve("gpu")


def test_torch_needs_nothing() -> None:
    assert resolve("torch").native is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="triton can run here")
def test_missing_backend_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="triton"):
        resolve("triton")


def test_without_compiler_auto_is_torch_and_cpu_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(isa: str) -> None:
        raise BuildError("no C++ compiler found")

    monkeypatch.setattr(dispatch.library, "load", refuse)
    monkeypatch.setattr(dispatch, "_triton_runs", lambda: False)
    assert resolve("auto").name == "torch"
    with pytest.raises(BackendError, match="no C\\+\\+ compiler"):
        resolve("cpu")


@needs_compiler
def test_an_instruction_set_the_machine_lacks_is_an_error() -> None:
    with pytest.raises(BackendError, match="does not run 'sse9'"):
        resolve("cpu", isa="sse9")


def test_best_instruction_set_first() -> None:
    assert build.runnable_isas(frozenset()) == ["generic"]
    assert build.runnable_isas(frozenset({"avx2", "fma", "f16c", "bmi2"})) == ["avx2", "generic"]


def test_compiler_is_taken_from_cxx_or_is_missing(tmp_path: Path) -> None:
    assert build.find_compiler({"CXX": "no-such-compiler"}) is None
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build.build("generic", env={"CXX": "no-such-compiler", "HEADRACE_CACHE_DIR": str(tmp_path)})


def test_a_compiler_that_refuses_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken++"
    broken.write_text("#!/bin/sh\necho nonsense >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(BuildError, match=r"broken\+\+.*failed:\nnonsense"):
        build.build("generic", env={"CXX": str(broken), "HEADRACE_CACHE_DIR": str(tmp_path / "cache")})
    assert not list((tmp_path / "cache").rglob("*.so"))


@needs_compiler
def test_compiled_once_for_two_processes_at_once(tmp_path: Path) -> None:
    """A stand-in compiler counts its calls and copies what the real one made before."""
    real = build.build("generic")
    compiler, calls = tmp_path / "fake++", tmp_path / "calls"
    compiler.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && exit 0\n'
        f'echo "$1" >> {calls}\n'
        "for last; do :; done\n"
        f'[ "$1" = -shared ] && sleep 0.3 && cp {real} "$last" || touch "$last"\n'
    )
    compiler.chmod(0o755)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from headrace_kernels.native.build import build; "
        "print(build('generic'))"
    )
    environment = {
        "CXX": str(compiler),
        "HEADRACE_CACHE_DIR": str(tmp_path / "cache"),
        "PATH": "/usr/bin:/bin",
    }
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(build.PACKAGE.parent)],
            env=environment,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    paths = {child.communicate(timeout=60)[0] for child in children}
    assert len(paths) == 1
    assert calls.read_text().count("-shared") == 1


@needs_compiler
def test_threads_are_set_at_run_time() -> None:
    native = dispatch.backend().native
    if native is None:
        pytest.skip("the environment chose another backend")
    dispatch.set_threads(3)
    assert native.hr_threads() == 3
    dispatch.set_threads(2)
    with pytest.raises(ValueError, match="at least 1"):
        dispatch.set_threads(0)

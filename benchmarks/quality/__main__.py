"""`python -m benchmarks.quality`: what forms of weights, activations and cache cost, beside peers'.

Teacher-forced on a fixed text: the model reads it in windows, and at each token of a window's second half its
probabilities for the next one are compared with those of fp32 over the same weights.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from benchmarks import machine
from benchmarks.peers.install import InstallError, PeerFolder
from benchmarks.peers.report import Grid
from benchmarks.quality import llama, openvino, ours
from benchmarks.quality.base import BaseFile, Quality
from benchmarks.quality.text import WINDOW_TOKENS, TextError, windows_of
from headrace.config import ConfigError, WorkerSettings, default_cache_dir, fields
from headrace.models import ModelError, demo_model_path
from worker.text.codec import load_tokenizer

RESULTS = Path(__file__).parents[1] / "results"
Settings = Mapping[str, str | int]
REFERENCE = "headrace fp32"
# `gguf`: the file that llama.cpp's quantisation made of the demo model, instead of the demo model itself.
OURS: Mapping[str, Settings] = {
    REFERENCE: {},
    "headrace bf16 weights": {"weights": "bf16"},
    "headrace q8 weights": {"weights": "q8"},
    "headrace q4 weights": {"weights": "q4"},
    "headrace fp16 KV": {"kv_dtype": "fp16"},
    "headrace int8 KV": {"kv_dtype": "int8"},
    "headrace int8": {"activations": "int8"},
    "headrace int8, fp32 KV": {"activations": "int8", "kv_dtype": "fp32"},
    "headrace int8, q8 weights": {"activations": "int8", "weights": "q8"},
    "headrace Q4_0 file": {"gguf": "q4_0"},
    "headrace Q4_0 file, int8": {"gguf": "q4_0", "activations": "int8"},
}
OPENVINO_FP32 = ("KV_CACHE_PRECISION=f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE=0")
# The file's form, and flags of the program.
LLAMA: Mapping[str, tuple[str, Sequence[str]]] = {
    "llama.cpp F16": ("f16", ()),
    "llama.cpp Q8_0": ("q8_0", ()),
    "llama.cpp Q4_1": ("q4_1", ()),
    "llama.cpp Q4_0": ("q4_0", ()),
    "llama.cpp Q4_1, cache in q8_0": ("q4_1", ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")),
}
# The file's form, and properties of the runtime.
OPENVINO: Mapping[str, tuple[str, Sequence[str]]] = {
    f"openvino {stored.upper()}{tail}": (stored, ("INFERENCE_PRECISION_HINT=f32", *more))
    for stored, tail, more in (
        ("f16", "", ()),
        ("f16", ", cache in fp32", ("KV_CACHE_PRECISION=f32",)),
        ("q8_0", "", ()),
        ("q4_1", "", ()),
        ("q4_1", ", activations and cache in fp32", OPENVINO_FP32),
    )
}
PEERS: Mapping[str, Mapping[str, tuple[str, Sequence[str]]]] = {"llama": LLAMA, "openvino": OPENVINO}
GROUPS: Mapping[str, Sequence[str]] = {"ours": list(OURS), **{kind: list(of) for kind, of in PEERS.items()}}
PROBLEMS = (ConfigError, ModelError, InstallError, llama.LlamaError, openvino.OpenVinoError, OSError)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Comparison:
    """Measures one form after another and keeps what was found, and why a form could not be."""

    def __init__(self, base: BaseFile, folder: PeerFolder, threads: int, console: Console) -> None:
        self.base = base
        self.found: dict[str, Quality] = {}
        self.missing: dict[str, str] = {}
        self._folder = folder
        self._threads = threads
        self._console = console

    def ours(self, name: str, settings: Settings) -> None:
        self._measure(name, lambda: self._own_quality(name, settings))

    def peer(self, kind: str, name: str) -> None:
        measure = {"llama": self._llama_quality, "openvino": self._openvino_quality}[kind]
        self._measure(name, lambda: measure(*PEERS[kind][name]))

    def _measure(self, name: str, quality: Callable[[], Quality]) -> None:
        begin = time.perf_counter()
        try:
            found = self.found[name] = quality()
        except PROBLEMS as problem:
            self.missing[name] = str(problem).splitlines()[0]
            self._console.print(f"[yellow]  {name}: {self.missing[name]}")
        else:
            taken_s = time.perf_counter() - begin
            self._console.print(f"  {name}: {' '.join(_cells(found))} ({taken_s:.0f} s)")

    def _own_quality(self, name: str, settings: Settings) -> Quality:
        runner = ours.make_runner(self._resolved(settings), self.base.size)
        logits = ours.window_logits(runner, self.base.windows)
        if name == REFERENCE and not self.base.is_whole():
            logits = self.base.write(logits)
        try:
            return self.base.compare(logits)
        finally:
            del runner, logits
            gc.collect()

    def _resolved(self, settings: Settings) -> Settings:
        given = {"threads": self._threads, **settings}
        stored = given.pop("gguf", None)
        if stored is not None:
            given |= {"model": str(self._folder.gguf(str(stored))), "cache_dir": str(self._folder.root)}
        if unknown := set(given) - {field.name for field in fields(WorkerSettings)}:
            raise ConfigError(f"the worker has no setting {', '.join(sorted(unknown))}")
        return given

    def _llama_quality(self, stored: str, flags: Sequence[str]) -> Quality:
        program, model = self._folder.llama_perplexity(), self._folder.gguf(stored)
        return llama.measure(program, model, self.base, self._threads, flags)

    def _openvino_quality(self, stored: str, properties: Sequence[str]) -> Quality:
        python, model = self._folder.openvino(), self._folder.gguf(stored)
        log = self._folder.logs / "quality-openvino.log"
        return self.base.compare(
            openvino.window_logits(python, model, self.base, self._threads, properties, log)
        )


@app.command()
def main(
    forms: Annotated[
        str,
        typer.Option(
            help=f"Names as the table has them, or of {', '.join(GROUPS)}; separated by semicolons. "
            "Peers are installed on first use."
        ),
    ] = ";".join(GROUPS),
    setting: Annotated[
        list[str] | None,
        typer.Option(help="One more form of ours: name=value[,name=value…]; may be repeated."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="File of the reference, taken if it is there, else made and kept (2 GB)."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help=f"Of {WINDOW_TOKENS} tokens; half of each count.")] = 40,
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
) -> None:
    """Perplexity, divergence from fp32 and agreement with it, on the demo model."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    folder = PeerFolder(Path(os.environ.get("HEADRACE_CACHE_DIR") or default_cache_dir()) / "peers")
    named = [REFERENCE, *named_forms(forms)]
    chosen = {**{name: OURS[name] for name in OURS if name in named}, **dict(map(_extra, setting or []))}
    codec = load_tokenizer(demo_model_path())
    with tempfile.TemporaryDirectory(prefix="headrace-quality-", dir=folder.root) as work:
        try:
            kept = BaseFile(base or Path(work) / "base", windows_of(codec, windows), codec.vocab_size)
        except TextError as problem:
            raise typer.BadParameter(f"--windows: {problem}") from None
        comparison = Comparison(kept, folder, threads or os.cpu_count() or 1, console)
        for name, settings in chosen.items():
            comparison.ours(name, settings)
            if REFERENCE in comparison.missing:
                raise typer.Exit(1)
        for kind, of in PEERS.items():
            for name in of:
                if name in named:
                    comparison.peer(kind, name)
    grid = _grid(comparison)
    console.print(grid.rich())
    console.print(f"written: {_write(comparison, grid, chosen)} and .md")


def named_forms(forms: str) -> Sequence[str]:
    """`ours; openvino Q4_1` to the names of forms. Raises typer.BadParameter."""
    parts = [part.strip() for part in forms.split(";") if part.strip()]
    names = [name for part in parts for name in GROUPS.get(part, [part])]
    for name in names:
        if not any(name in of for of in GROUPS.values()):
            raise typer.BadParameter(f"--forms: {name!r}: there is no such form or group of forms")
    return names


def _extra(text: str) -> tuple[str, Settings]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(equals for _, equals, _ in pairs):
        raise typer.BadParameter(f"--setting: {text!r}: name=value, separated by commas")
    return f"headrace {text}", {name.strip(): value.strip() for name, _, value in pairs}


def _cells(found: Quality) -> list[str]:
    return [
        f"{found.perplexity:.3f} ± {found.perplexity_error:.3f}",
        f"{found.kl:.5f} ± {found.kl_error:.5f}",
        f"{found.top1:.2%} ± {found.top1_error:.2%}",
    ]


def _grid(comparison: Comparison) -> Grid:
    base = comparison.base
    title = f"{base.rows * len(base.windows):,} tokens scored of {base.size * len(base.windows):,}"
    reference = comparison.found[REFERENCE].perplexity
    rows = []
    for name, found in comparison.found.items():
        perplexity, *others = _cells(found)
        rows.append([name, perplexity, f"{found.perplexity / reference - 1:+.2%}", *others])
    return Grid(title, ["form", "perplexity", "to fp32", "KL from fp32, nats", "top-1 agreement"], rows)


def _write(comparison: Comparison, grid: Grid, chosen: Mapping[str, Settings]) -> Path:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"quality-{time.strftime('%Y%m%d-%H%M%S')}.json"
    raw: Mapping[str, Any] = {
        "machine": {**machine.describe(), "python": sys.version.split()[0]},
        "windows": len(comparison.base.windows),
        "settings": chosen,
        "quality": {name: asdict(found) for name, found in comparison.found.items()},
        "missing": comparison.missing,
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(raw)))
    path.with_suffix(".md").write_text(grid.markdown() + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    app()

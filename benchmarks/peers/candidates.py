"""Who takes part: Headrace in its variants, and each peer as it serves this model best."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from benchmarks.peers.install import InstallError, PeerFolder
from benchmarks.peers.sessions import Start, driver, headrace, llama
from headrace.config import WorkerSettings, fields

OURS: Mapping[str, Mapping[str, str | int]] = {
    "fp32": {},
    "bf16": {"weights": "bf16"},
    "q8": {"weights": "q8"},
    "q4": {"weights": "q4"},
    "int8": {"activations": "int8"},
    "fp32-plain": {"speculative_tokens": 0},
    "bf16-plain": {"weights": "bf16", "speculative_tokens": 0},
    "int8-plain": {"activations": "int8", "speculative_tokens": 0},
}
GUESSES = 8  # of a peer that is asked to guess ahead, as ours does unless told otherwise
KV_TOKENS = 16_384  # room of every server's cache; the work needs less than 9,000 at any time
KV_BLOCK = 16
VLLM_START_S = 1200.0  # each start compiles the model, for minutes if others need the cores too
ALL_MODES = frozenset({"offline", "online", "single"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """One line of the table. `modes`: what it can do at all."""

    name: str
    start: Start
    version: str
    is_ours: bool = False
    modes: frozenset[str] = ALL_MODES


@dataclass(frozen=True, slots=True)
class Lineup:
    candidates: Sequence[Candidate]
    missing: Mapping[str, str]  # who cannot take part, and why


Make = Callable[[str, PeerFolder, int], Candidate]


def line_up(
    ours: Iterable[str],
    peers: Iterable[str],
    folder: PeerFolder,
    threads: int,
    settings: Mapping[str, str | int],
) -> Lineup:
    """Installs what is not there yet. A peer that cannot be had is reported, never fatal."""
    found: list[Candidate] = []
    missing: dict[str, str] = {}
    known = {field.name for field in fields(WorkerSettings)}
    for variant in ours:
        if unknown := set(OURS[variant]) - known:
            missing[f"headrace:{variant}"] = f"the worker has no setting {', '.join(sorted(unknown))}"
        else:
            found.append(_ours(variant, threads, settings))
    for name in peers:
        try:
            found.append(PEERS[name](name, folder, threads))
        except (InstallError, OSError) as problem:
            missing[name] = str(problem)
    return Lineup(found, missing)


def _ours(variant: str, threads: int, settings: Mapping[str, str | int]) -> Candidate:
    # Without the prefix cache: the same prompts come again in every mode, and the peers' are off too.
    fixed: dict[str, str | int] = {"prefix_cache": "false", "log_format": "json", "threads": threads}
    fixed |= {"block_size": KV_BLOCK, "num_kv_blocks": KV_TOKENS // KV_BLOCK}
    start = headrace({**fixed, **settings, **OURS[variant]})
    return Candidate(f"headrace:{variant}", start, "", is_ours=True)


# Beside its own choices. fp32 arithmetic is what a processor with bf16 would not do by itself; its cache of
# keys and values is in bytes unless told otherwise.
OPENVINO: Mapping[str, Sequence[str]] = {
    "": ["INFERENCE_PRECISION_HINT=f32"],
    "kv32": ["INFERENCE_PRECISION_HINT=f32", "KV_CACHE_PRECISION=f32"],
    "own": [],
    "own-lookup": [],
}


def _openvino(name: str, folder: PeerFolder, threads: int) -> Candidate:
    stored, _, choice = name.partition(":")[2].partition("-")
    python, model = folder.openvino(), folder.gguf(stored)
    guesses = GUESSES if choice.endswith("lookup") else 0
    after = [str(threads), str(KV_TOKENS), str(guesses), *OPENVINO[choice]]
    start = driver(python, "drive_openvino.py", [str(model)], after, {})
    return Candidate(name, start, folder.version("openvino"))


def _llama(name: str, folder: PeerFolder, threads: int) -> Candidate:
    stored, _, choice = name.partition(":")[2].partition("-")
    guesses = GUESSES if choice else 0
    start = llama(folder.llama_server(), folder.gguf(stored), threads, KV_TOKENS, guesses)
    return Candidate(name, start, folder.version("llama"))


def _vllm(name: str, folder: PeerFolder, threads: int) -> Candidate:
    python, model = folder.vllm(), folder.fp32_folder()
    env = {
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": str(python.parent.parent / "lib" / "libiomp5.so"),
        "VLLM_CACHE_ROOT": str(folder.root / "vllm-cache"),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "PATH": f"{python.parent}:{os.environ.get('PATH', os.defpath)}",
    }
    start = driver(python, "drive_vllm.py", [str(model)], [str(KV_TOKENS)], env, VLLM_START_S)
    return Candidate(name, start, folder.version("vllm"))


def _transformers(name: str, folder: PeerFolder, threads: int) -> Candidate:
    way = name.partition(":")[2]
    after = [str(threads), "continuous" if way == "continuous" else f"static:{way.removeprefix('static')}"]
    model = [str(folder.fp32_folder())]
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    start = driver(sys.executable, "drive_transformers.py", model, after, env)
    modes = {"static1": {"single"}, "continuous": {"offline", "online"}}.get(way, {"offline"})
    return Candidate(name, start, version("transformers"), modes=frozenset(modes))


OPENVINO_FORMS = ("f16", "f16-kv32", "f16-own", "f16-own-lookup", "q4_1", "q8_0")
LLAMA_FORMS = ("q4_0", "q4_0-ngram", "q8_0", "f16", "q4_1", "q4_1-ngram")
PEERS: Mapping[str, Make] = {
    **{f"openvino:{stored}": _openvino for stored in OPENVINO_FORMS},
    **{f"llama:{stored}": _llama for stored in LLAMA_FORMS},
    "vllm:fp32": _vllm,
    **{f"transformers:{way}": _transformers for way in ("continuous", "static32", "static8", "static1")},
}
SHORT = {
    "openvino": ["openvino:f16"],
    "llama": ["llama:q4_0"],
    "vllm": ["vllm:fp32"],
    "transformers": ["transformers:continuous", "transformers:static32", "transformers:static1"],
}


def peers_named(text: str) -> list[str]:
    """`openvino,llama:q8_0` to full names; `all`: each peer at its best. Raises ValueError."""
    names = list(SHORT) if text == "all" else [part.strip() for part in text.split(",") if part.strip()]
    full = [name for part in names for name in SHORT.get(part, [part])]
    for name in full:
        if name not in PEERS:
            raise ValueError(f"{name!r} is no peer: choose of {', '.join([*SHORT, *PEERS])}")
    return full

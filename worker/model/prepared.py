"""What the compiled kernels made of a model, kept in the cache: the next start reads that alone.

A file holds the packed weights, the rotary tables, what the model's configuration and vocabulary say, and the
logits transformers gave for the self-test, which each start makes again. Its name carries everything it was
made from: the checkpoint, the forms asked for, the program's own text, the compiled library, torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import structlog
import torch

import headrace_kernels
from headrace_kernels.dispatch import backend
from worker.model.compiled import TABLE_STEP, CompiledModel, Tables
from worker.model.inflate import file_identity, inflated_folder, is_inflated
from worker.model.prepared_file import ModelFacts, Prepared, read_prepared, write_prepared
from worker.model.selftest import Reference
from worker.model.stored import Forms

log = structlog.get_logger()
MAX_TABLE_BYTES = 64 << 20  # larger tables are made at each start, from the model


def place(path: Path, cache_dir: Path, forms: Forms) -> Path:
    """Where the model of a folder or GGUF file is kept, in the forms asked for. Changes with all of it."""
    source = hashlib.blake2b(_identity(path).encode(), digest_size=6).hexdigest()
    made_by = hashlib.blake2b(_makers().encode(), digest_size=6).hexdigest()
    stem = f"{path.name.removesuffix('.gguf')}-{source}-{forms.weights}-{forms.activations}"
    return cache_dir / "prepared" / f"{stem}-{made_by}.model"


def tokenizer_folder(path: Path, cache_dir: Path) -> Path | None:
    """Where the tokenizer of a model that was loaded before is; None if it is not there (any more)."""
    if path.suffix != ".gguf":
        return path
    return inflated_folder(path, cache_dir) if is_inflated(path, cache_dir) else None


def keep(place: Path, model: CompiledModel, facts: ModelFacts, reference: Reference) -> None:
    """Written under another name and renamed when whole. What earlier programs made of the checkpoint goes.

    A disk that is full or not to be written costs the next start its time, nothing else.
    """
    tables = model.tables(facts.max_model_len)
    if reason := _not_kept(model, tables):
        log.info("model_not_kept", reason=reason)
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".preparing-", dir=place.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                write_prepared(file, model, facts, reference, tables)
            os.replace(name, place)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        for other in place.parent.iterdir():
            if other != place and other.name.startswith(place.stem.rpartition("-")[0] + "-"):
                other.unlink(missing_ok=True)
    except OSError as problem:
        log.info("model_not_kept", reason=problem.strerror)


def _not_kept(model: CompiledModel, tables: Tables) -> str:
    if sum(t.numel() * t.itemsize for pair in tables for t in pair) > MAX_TABLE_BYTES:
        return "its rotary tables are too large"
    for whole, first in zip(tables, model.tables(TABLE_STEP), strict=True):
        if not all(torch.equal(w[:TABLE_STEP], f[: len(w)]) for w, f in zip(whole, first, strict=True)):
            return "its rotary tables depend on how many positions are asked for"
    return ""


def read(place: Path) -> Prepared | None:
    """None where nothing (whole) is kept."""
    try:
        return read_prepared(place)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, msgspec.MsgspecError) as problem:
        log.warning("prepared_model_not_read", file=place.name, reason=str(problem))
        return None


def _identity(path: Path) -> str:
    """Names a checkpoint's content without reading it: of each file size and time of change."""
    if path.is_file():
        return file_identity(path)
    files = ((p.name, p.stat()) for p in sorted(path.iterdir()) if p.is_file())
    return repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files])


@cache
def _makers() -> str:
    """Everything else the file depends on."""
    digest = hashlib.blake2b(digest_size=16)
    for root in (Path(__file__).parent, Path(headrace_kernels.__file__).parent):
        for source in sorted(root.rglob("*.py")):
            digest.update(source.read_bytes())
    try:
        reader = version("transformers")
    except PackageNotFoundError:
        reader = ""
    library = Path(backend().library._name).name
    return f"{digest.hexdigest()} {library} {torch.__version__} {reader}"

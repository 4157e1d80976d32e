"""GGUF files: inflated once into a Hugging Face folder in the cache, which then loads in a moment."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import safe_open
from safetensors.torch import save_file

log = structlog.get_logger()
FORMAT = 1  # raise it when the folder's content changes
_DONE = "inflated.json"


def inflated_folder(gguf: Path, cache_dir: Path) -> Path:
    """The folder with config, tokenizer and fp32 safetensors of a GGUF file, made on first use.

    It is written under another name and renamed when whole, so a killed process leaves nothing half done.
    """
    folder = _folder_of(gguf, cache_dir)
    if _is_whole(folder):
        return folder
    log.info("inflating a GGUF file, once", file=gguf.name, into=str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".inflating-", dir=folder.parent))
    try:
        _inflate(gguf, work)
        if folder.exists() and not _is_whole(folder):
            shutil.rmtree(folder)
        try:
            os.replace(work, folder)
        except OSError:  # another process was first
            if not _is_whole(folder):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def is_inflated(gguf: Path, cache_dir: Path) -> bool:
    return _is_whole(_folder_of(gguf, cache_dir))


def inflate_model(gguf: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """The configuration and fp32 tensors (named as in transformers) of a GGUF file. Raises ValueError."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with contextlib.redirect_stderr(io.StringIO()):  # it draws a progress bar that no setting turns off
        loaded = load_gguf_checkpoint(
            str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
        )
    config.architectures = [type(model).__name__]
    config._name_or_path = ""
    return config, {name: tensor.contiguous() for name, tensor in loaded["tensors"].items()}


def _inflate(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    config, tensors = inflate_model(gguf)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    size = (folder / "model.safetensors").stat().st_size
    done = {"format": FORMAT, "source": gguf.name, "weights_bytes": size}
    (folder / _DONE).write_text(json.dumps(done) + "\n")


def _folder_of(gguf: Path, cache_dir: Path) -> Path:
    return cache_dir / "inflated" / f"{gguf.stem}-{file_identity(gguf)}"


def file_identity(gguf: Path) -> str:
    """Names the file's content without reading all of it: size, modification time, head and tail."""
    stat = gguf.stat()
    digest = hashlib.blake2b(f"{FORMAT} {stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=6)
    with gguf.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, stat.st_size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()


def _is_whole(folder: Path) -> bool:
    weights = folder / "model.safetensors"
    try:
        done = json.loads((folder / _DONE).read_text())
        if done["format"] != FORMAT or weights.stat().st_size != done["weights_bytes"]:
            return False
        with safe_open(weights, "pt") as file:  # reads and checks the header
            return bool(file.keys())
    except (OSError, ValueError, KeyError):
        return False

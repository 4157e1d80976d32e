"""Where a model's checkpoint is, and the unmodified transformers model in it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from headrace.models import ModelError, resolve_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INFLATED_PER_GGUF_BYTE = 9  # fp32 from 4-bit blocks, with room


class UnsupportedModel(Exception):
    """The model cannot run packed; the message says why in one line."""


def find(model: str | Path | None, cache_dir: str | Path | None) -> Path:
    """The folder with config.json, or the GGUF file; None is the demo model. Raises ModelError."""
    given = None if model is None else Path(model).expanduser()
    if given is not None and given.is_dir() and not (given / "config.json").exists():
        files = sorted(given.glob("*.gguf"))
        if len(files) == 1:
            return files[0].resolve()
        if files:
            raise ModelError(f"model {given}: {len(files)} GGUF files in this folder; name one")
    return resolve_model(None if model is None else str(model), cache_dir)


def name_of(model: str | Path | None, path: Path) -> str:
    """The hub id as it was given; else the name of the file or folder."""
    if path.suffix == ".gguf":
        return path.stem
    return path.name if model is None or Path(model).expanduser().exists() else str(model)


def choose_device(device: str) -> torch.device:
    if device not in ("auto", "cpu") and not device.startswith("cuda"):
        raise ModelError(f"device {device!r}: give auto, cpu or cuda")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device {device!r}: torch finds no CUDA device")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device, stored: torch.dtype | None) -> torch.dtype:
    """On the CPU always fp32: products of other types are emulated there, slower and coarser."""
    if dtype != "auto" and dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r}: give auto, {', '.join(_DTYPES)}")
    if device.type == "cpu":
        if dtype not in ("auto", "float32"):
            raise ModelError(
                f"dtype {dtype!r}: on the CPU arithmetic is float32, whatever the checkpoint holds"
            )
        return torch.float32
    return _DTYPES[dtype] if dtype != "auto" else stored or torch.bfloat16


def is_inflated_first(path: Path, cache_dir: str | Path | None) -> bool:
    """Whether the file is a GGUF that is turned into a folder in `cache_dir`, or was."""
    return path.suffix == ".gguf" and cache_dir is not None and _has_room(Path(cache_dir), path)


def load_plain(
    path: Path,
    device: torch.device,
    dtype: str,
    trust_remote_code: bool,
    cache_dir: str | Path | None,
    *,
    on_host: bool = False,
) -> tuple[Any, Path]:
    """The unmodified model, and the folder (or GGUF file) its tokenizer is in.

    `on_host`: as `device` wants it, but still in the host's memory.
    """
    _quiet_transformers()
    hf, folder = _load(path, device, dtype, trust_remote_code, cache_dir)
    return (hf if on_host else hf.to(device)).eval(), folder


def _load(
    path: Path, device: torch.device, dtype: str, trust_remote_code: bool, cache_dir: str | Path | None
) -> tuple[Any, Path]:
    if path.suffix != ".gguf":
        return _load_folder(path, device, dtype, trust_remote_code), path
    if is_inflated_first(path, cache_dir):
        from worker.model.inflate import inflated_folder

        folder = inflated_folder(path, Path(str(cache_dir)))
        return _load_folder(folder, device, dtype, False), folder
    return _load_gguf(path, device, dtype), path


def _load_folder(path: Path, device: torch.device, dtype: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError("an encoder-decoder; only decoders can be served")
    hf: Any
    info: Any
    hf, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
        path,
        config=config,
        dtype=choose_dtype(dtype, device, getattr(config, "dtype", None)),
        attn_implementation="eager",
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
    )
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise ModelError(f"{len(info['missing_keys'])} weights are missing ({some})")
    return hf


def _load_gguf(path: Path, device: torch.device, dtype: str) -> Any:
    """Inflated in memory: where there is no cache, or no room in it."""
    from transformers import AutoModelForCausalLM

    from worker.model.inflate import inflate_model

    config, tensors = inflate_model(path)
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    missing = set(hf.load_state_dict(tensors, strict=False, assign=True).missing_keys)
    hf.tie_weights()
    if missing - set(getattr(hf, "all_tied_weights_keys", {})):
        raise ModelError(f"{len(missing)} weights are missing ({sorted(missing)[0]})")
    return hf.to(choose_dtype(dtype, device, torch.float32))


def _has_room(folder: Path, gguf: Path) -> bool:
    from worker.model.inflate import is_inflated

    folder.mkdir(parents=True, exist_ok=True)
    needed = gguf.stat().st_size * _INFLATED_PER_GGUF_BYTE
    return is_inflated(gguf, folder) or shutil.disk_usage(folder).free > needed


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

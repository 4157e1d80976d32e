"""From a model's name to a model that is ready to run steps."""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch
from torch import nn

from headrace.models import ModelError, resolve_model
from worker.model.fingerprint import hash_weights, make_fingerprint
from worker.model.kv import LayerShape
from worker.model.threads import torch_threads
from worker.model.vocabulary import eos_token_ids, tokenizer_vocab_size

if TYPE_CHECKING:
    from worker.model.packed import PackedModel
    from worker.model.selftest import Reference
    from worker.model.stored import Forms

log = structlog.get_logger()
DEFAULT_CONTEXT = 4096  # for models that name no longest position
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INFLATED_PER_GGUF_BYTE = 9  # fp32 from 4-bit blocks, with room


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `exact`: its self-test found the same bits alone and in a crowd."""

    name: str
    path: Path  # a folder with config and tokenizer, or the GGUF file
    config: Any  # of transformers
    forward: Any  # PackedModel
    layers: tuple[LayerShape, ...]
    eos_ids: frozenset[int]
    vocab_size: int  # width of the logits
    tokenizer_vocab_size: int  # ids from here on are never chosen
    max_model_len: int
    fingerprint: str
    kv_bytes_per_token: int
    dtype: torch.dtype
    device: torch.device
    exact: bool

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.forward.model
        return model


def load(
    model: str | Path | None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    trust_remote_code: bool = False,
    cache_dir: str | Path | None = None,
    weights: str = "auto",
    activations: str = "fp32",
) -> LoadedModel:
    """Load a Hugging Face folder, a hub id, a GGUF file or a folder that holds one; None is the demo model.

    A GGUF file is inflated once into `cache_dir`, if given. On the CPU arithmetic is fp32, unless activations
    are asked for in int8; `weights` (auto, fp32, bf16, q8, q4) is how the compiled kernels keep them. Raises
    ModelError.
    """
    started_s = time.perf_counter()
    forms = _forms(weights, activations)
    path = _find(model, cache_dir)
    name = _name_of(model, path)
    where = _device(device)
    if threads:
        torch.set_num_threads(threads)
    with _one_line_errors(name), _uncollected():
        hf, folder = _load_plain(path, where, dtype, trust_remote_code, cache_dir)
        gguf = path if path.suffix == ".gguf" else None
        loaded = prepare(hf, name=name, folder=folder, device=where, gguf=gguf, forms=forms)
    log.info(
        "model loaded",
        model=name,
        seconds=round(time.perf_counter() - started_s, 2),
        way=loaded.forward.way,
        exact=loaded.exact,
        fingerprint=loaded.fingerprint,
    )
    return loaded


def prepare(
    hf: Any,
    *,
    name: str,
    folder: Path,
    device: torch.device,
    gguf: Path | None = None,
    fused: bool = True,
    forms: Forms | None = None,
) -> LoadedModel:
    """Make a transformers decoder (eager attention, unmodified) ready; its layers are replaced in place.

    `gguf`: the file its weights were inflated from, whose blocks the compiled kernels can take as they are.
    `fused`: use them if they can compute this model. `forms`: how they keep weights and activations.
    Raises UnsupportedModel or ModelError where its packed results are not those of transformers.
    """
    from headrace_kernels.dispatch import backend
    from worker.model import selftest
    from worker.model.fused import try_fused
    from worker.model.packed import PackedModel
    from worker.model.stored import Forms

    forms = forms or Forms()
    config = hf.config.get_text_config()
    dtype = next(hf.parameters()).dtype
    vocab_size = hf.get_output_embeddings().weight.shape[0]
    max_len = getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT
    configs = (hf.config, config, getattr(hf, "generation_config", None))
    weights = hash_weights(hf)
    threads = torch.get_num_threads()
    with torch_threads(1):  # short prompts gain nothing from more
        reference = selftest.make_reference(hf, min(vocab_size, config.vocab_size), max_len, device)
    forward: selftest.Forward | None = None
    if fused and backend().name == "triton" and forms.lossless:
        from worker.model.triton_model import try_triton

        forward = try_triton(hf, reference, device, dtype)
    elif fused and device.type == "cpu" and dtype == torch.float32:
        with torch_threads(1):
            forward = try_fused(PackedModel(hf, device), reference, gguf=gguf, threads=threads, forms=forms)
    if forward is not None:
        exact = True
        kernels: tuple[str, ...] = (backend().numerics, forward.way, forms.weights, forms.activations)
    elif not forms.lossless:
        raise ModelError(f"model {name}: {forms} needs the compiled kernels, which do not run it here")
    else:
        forward, exact, kernels = _prepare_packed(hf, name, device, reference, threads)
    return LoadedModel(
        name=name,
        path=folder,
        config=hf.config,
        forward=forward,
        layers=forward.layers,
        eos_ids=eos_token_ids(folder, configs, vocab_size),
        vocab_size=vocab_size,
        tokenizer_vocab_size=tokenizer_vocab_size(folder, vocab_size),
        max_model_len=int(max_len),
        fingerprint=make_fingerprint(weights, dtype=str(dtype), device=device.type, kernels=kernels),
        kv_bytes_per_token=sum(layer.bytes_per_token(dtype.itemsize) for layer in forward.layers),
        dtype=dtype,
        device=device,
        exact=exact,
    )


def _prepare_packed(
    hf: Any, name: str, device: torch.device, reference: Reference, threads: int
) -> tuple[PackedModel, bool, tuple[str, ...]]:
    """The model as transformers wrote it, over our products and attention; if it is exact; kernels."""
    from worker.model import selftest
    from worker.model.elementwise import align_activations
    from worker.model.linear import LinearReport, packing_available, replace_linears
    from worker.model.packed import PackedModel

    dtype = next(hf.parameters()).dtype
    linears = LinearReport("torch", 0, ((0, 0),))
    if device.type == "cpu" and packing_available():
        linears = replace_linears(hf, threads)
        align_activations(hf)
    forward = PackedModel(hf, device)
    kv = selftest.self_test_cache(forward, dtype, device)
    with torch_threads(1):
        crowd = selftest.crowded_logits(forward, reference.prompts, kv)
    error = selftest.disagreement(crowd, reference)
    if not error <= selftest.TOLERANCE[dtype]:
        raise ModelError(
            f"model {name}: packed logits differ from transformers' own by {error:.2g}; not supported"
        )
    exact = linears.exact and selftest.bits_agree(forward, reference.prompts, kv, crowd, threads)
    if not exact:
        log.warning("results may depend on the batch", model=name, shapes=linears.inexact)
    return forward, exact, (linears.backend, "tiles64", "exact" if exact else "inexact")


def _load_plain(
    path: Path, device: torch.device, dtype: str, trust_remote_code: bool, cache_dir: str | Path | None
) -> tuple[Any, Path]:
    """The unmodified model, and the folder (or GGUF file) its tokenizer is in."""
    _quiet_transformers()
    if path.suffix == ".gguf":
        return _load_gguf(path, device, dtype, cache_dir)
    return _load_folder(path, device, dtype, trust_remote_code), path


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
        dtype=_dtype(dtype, device, getattr(config, "dtype", None)),
        attn_implementation="eager",
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
    )
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise ModelError(f"{len(info['missing_keys'])} weights are missing ({some})")
    return hf.to(device).eval()


def _load_gguf(
    path: Path, device: torch.device, dtype: str, cache_dir: str | Path | None
) -> tuple[Any, Path]:
    from worker.model.inflate import inflate_model, inflated_folder

    if cache_dir is not None and _has_room(Path(cache_dir), path.stat().st_size):
        folder = inflated_folder(path, Path(cache_dir))
        return _load_folder(folder, device, dtype, False), folder
    from transformers import AutoModelForCausalLM

    config, tensors = inflate_model(path)
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    missing = set(hf.load_state_dict(tensors, strict=False, assign=True).missing_keys)
    hf.tie_weights()
    if missing - set(getattr(hf, "all_tied_weights_keys", {})):
        raise ModelError(f"{len(missing)} weights are missing ({sorted(missing)[0]})")
    return hf.to(device, _dtype(dtype, device, torch.float32)).eval(), path


def _has_room(folder: Path, gguf_bytes: int) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(folder).free > gguf_bytes * _INFLATED_PER_GGUF_BYTE


def _forms(weights: str, activations: str) -> Forms:
    from worker.model.stored import Forms

    try:
        return Forms(weights, activations)
    except ValueError as problem:
        raise ModelError(str(problem)) from problem


def _find(model: str | Path | None, cache_dir: str | Path | None) -> Path:
    """The folder with config.json, or the GGUF file."""
    given = None if model is None else Path(model).expanduser()
    if given is not None and given.is_dir() and not (given / "config.json").exists():
        files = sorted(given.glob("*.gguf"))
        if len(files) == 1:
            return files[0].resolve()
        if files:
            raise ModelError(f"model {given}: {len(files)} GGUF files in this folder; name one")
    return resolve_model(None if model is None else str(model), cache_dir)


def _name_of(model: str | Path | None, path: Path) -> str:
    """The hub id as it was given; else the name of the file or folder."""
    if path.suffix == ".gguf":
        return path.stem
    return path.name if model is None or Path(model).expanduser().exists() else str(model)


def _device(device: str) -> torch.device:
    if device not in ("auto", "cpu") and not device.startswith("cuda"):
        raise ModelError(f"device {device!r}: give auto, cpu or cuda")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device {device!r}: torch finds no CUDA device")
    return torch.device(device)


def _dtype(dtype: str, device: torch.device, stored: torch.dtype | None) -> torch.dtype:
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


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Garbage collection off: loading makes many objects that stay, and each collection walks them all."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    from worker.model.attention import UnsupportedModel

    try:
        yield
    except UnsupportedModel as problem:
        raise ModelError(f"model {name}: {problem}; not supported") from problem
    except ModelError as problem:
        text = str(problem)
        raise (problem if text.startswith("model ") else ModelError(f"model {name}: {text}")) from problem
    except Exception as problem:  # transformers and its readers raise errors of every kind
        first = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise ModelError(f"model {name}: cannot be loaded: {first}") from problem

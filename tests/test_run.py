"""`make test` in small: both parts run, the status tells of either, and Ctrl-C ends it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PASSES = "def test_{name}(): pass\n"
FAILS = "def test_{name}(): raise OSError\n"
WAITS = "import pathlib, time\ndef test_{name}():\n    pathlib.Path('waiting').touch()\n    time.sleep(600)\n"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    return tmp_path


def write(suite: Path, crowd: str = "", alone: str = "") -> None:
    """Tests that run side by side, and tests of a room that has the machine for itself."""
    (suite / "faults").mkdir()
    for path, text in ((suite / "test_crowd.py", crowd), (suite / "faults" / "test_alone.py", alone)):
        if text:
            path.write_text(text.format(name="it"))


def start(suite: Path) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take seconds to load
    command = [sys.executable, str(ROOT / "tests" / "run.py"), "-v", "-p", "xdist"]
    return subprocess.Popen(
        command,
        cwd=suite,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell may ignore it
    )


@pytest.mark.parametrize(
    ("crowd", "alone", "status"),
    [
        pytest.param(PASSES, PASSES, 0, id="both pass"),
        pytest.param(FAILS, PASSES, 1, id="the first fails"),
        pytest.param(PASSES, FAILS, 1, id="the second fails"),
        pytest.param(PASSES, "", 0, id="only the first has tests"),
        pytest.param("", PASSES, 0, id="only the second has tests"),
        pytest.param("", "", 5, id="neither has tests"),
    ],
)
def test_the_status_is_that_of_both_parts(suite: Path, crowd: str, alone: str, status: int) -> None:
    write(suite, crowd, alone)
    run = start(suite)
    said, _ = run.communicate(timeout=100)
    assert run.returncode == status, said
    assert said.count("::test_") >= bool(crowd) + bool(alone), said


def test_ctrl_c_ends_it_before_the_other_part(suite: Path) -> None:
    write(suite, WAITS, PASSES)
    run = start(suite)
    while not (suite / "waiting").exists():
        assert run.poll() is None
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=100)
    assert run.returncode == 2, said
    assert "test_alone" not in said

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from headrace.cli import children
from headrace.cli.children import Child
from headrace.processes import start_child, stop_child


class Lines:
    """What children wrote, with a way to wait for a line."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._changed = threading.Condition()

    def __call__(self, name: str, line: str) -> None:
        with self._changed:
            self.lines.append((name, line))
            self._changed.notify_all()

    def wait_for(self, text: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(text in line for _, line in self.lines), 30)


def child_of(code: str, show: Callable[[str, str], None], env: Mapping[str, str] | None = None) -> Child:
    variables = os.environ | (env or {})
    return Child("worker", [sys.executable, "-u", "-c", code], lambda: variables, show)


def test_output_is_shown_under_the_childs_name_and_its_last_words_are_kept() -> None:
    lines = Lines()
    child = child_of("import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)", lines)
    child.start()
    assert child.wait(30)
    assert lines.lines == [("worker", "one"), ("worker", "two")]
    assert child.last_words() == "worker ended with exit status 3: two"


def test_a_child_killed_by_a_signal_says_so() -> None:
    lines = Lines()
    child = child_of("import time; print('up'); time.sleep(600)", lines)
    child.start()
    lines.wait_for("up")
    assert child.poll() is None
    assert not child.wait(0.01)
    child.kill()
    assert child.wait(30)
    assert child.last_words() == "worker ended with SIGKILL: up"


def test_a_child_is_asked_to_end_with_sigterm() -> None:
    lines = Lines()
    code = "import signal\nsignal.signal(15, lambda *_: exit(7))\nprint('up')\nsignal.pause()"
    child = child_of(code, lines)
    child.start()
    lines.wait_for("up")
    child.terminate()
    assert child.wait(30)
    assert child.poll() == 7


def test_the_environment_is_asked_at_each_start() -> None:
    lines, starts = Lines(), iter(["first", "second"])
    command = [sys.executable, "-c", "import os; print(os.environ['NAME'])"]
    child = Child("worker", command, lambda: os.environ | {"NAME": next(starts)}, lines)
    for _ in range(2):
        child.start()
        assert child.wait(30)
    assert [line for _, line in lines.lines] == ["first", "second"]


def test_restarts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(children.time, "monotonic", lambda: now)
    child = child_of("", lambda *_: None)
    assert [child.may_restart() for _ in range(children.MAX_RESTARTS + 1)] == [
        True
    ] * children.MAX_RESTARTS + [False]
    now += children.RESTART_WINDOW_S + 1
    assert child.may_restart()


def test_a_child_that_ignores_sigterm_is_killed_with_its_own_children() -> None:
    read_end, write_end = os.pipe()
    code = "import signal, subprocess, sys; signal.signal(15, signal.SIG_IGN); print(flush=True); "
    code += "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'], close_fds=False)"
    child = start_child([sys.executable, "-c", code], output=write_end, pass_fds=(write_end,))
    os.close(write_end)
    assert os.read(read_end, 1) == b"\n"
    assert stop_child(child, timeout_s=0.1) == -signal.SIGKILL
    # The pipe ends when the last of them has ended.
    assert os.read(read_end, 1) == b""
    os.close(read_end)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_children_die_with_us(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom headrace.processes import start_child\n"
        "child = start_child([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(600)"
    )
    read_end, write_end = os.pipe()
    parent = start_child([sys.executable, "-c", code], output=write_end)
    os.close(write_end)
    with os.fdopen(read_end) as output:
        pid = int(output.readline())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        assert output.read() == ""  # ends when the grandchild, too, has closed it
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < until

"""Hosts whose wall clock is wrong, or jumps: leases, deadlines and cards go by the clock of Redis alone."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.redis, pytest.mark.e2e, pytest.mark.timeout(90)]
QUIET = ("--log-level", "warning")
CLOCK_SHIM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *offset_s;
static long offset(void) {
  if (!offset_s) {
    int fd = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY);
    void *mapped = fd < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) abort();
    offset_s = mapped;
    close(fd);
  }
  return *offset_s;
}
int clock_gettime(clockid_t id, struct timespec *t) {
  int failed = syscall(SYS_clock_gettime, id, t);
  if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += offset();
  return failed;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
  struct timespec now;
  int failed = clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec, t->tv_usec = now.tv_nsec / 1000;
  return failed;
}
time_t time(time_t *t) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (t) *t = now.tv_sec;
  return now.tv_sec;
}
"""


class WrongClock:
    """The wall clock of processes started under it: seconds off, to be changed while they run."""

    def __init__(self, folder: Path) -> None:
        self._offset = folder / "offset"
        self._library = folder / "clock.so"
        source = folder / "clock.c"
        source.write_text(CLOCK_SHIM)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", self._library, source], check=True)

    def set(self, seconds: int) -> None:
        self._offset.touch()
        with self._offset.open("r+b") as file:  # in place: it is mapped
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))

    @property
    def variables(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "CLOCK_OFFSET_FILE": str(self._offset)}


@pytest.fixture
def wrong_clock(tmp_path) -> WrongClock:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return WrongClock(tmp_path)


@pytest.mark.parametrize("skew_s", [-120, 120])
def test_only_the_clock_of_redis_counts(pool, tools, monkeypatch, wrong_clock, skew_s):
    wrong_clock.set(skew_s)
    with monkeypatch.context() as env:
        for name, value in wrong_clock.variables.items():
            env.setenv(name, value)
        shown = subprocess.check_output([sys.executable, "-c", "import time; print(time.time())"])
        assert abs(float(shown) - time.time() - skew_s) < 30
        wrong = pool.start(*QUIET, step_ms=10)
    jobs = [pool.submit(prompt="skew", max_tokens=100, temperature=0, ttl_ms=30_000) for _ in range(2)]
    pool.wait_tokens(jobs[1], 20)
    pool.start(*QUIET, step_ms=10)  # by its clock the other's lease and card are long over, or far ahead
    wrong_clock.set(-3600)  # a step backwards in the middle
    for job in jobs:
        assert tools.text_of(pool.wait_end(job)) == tools.answer("skew", 100)
        assert pool.state(job)["attempt"] == "1"
    pool._workers[1].send_signal(signal.SIGTERM)
    pool._workers[1].wait(10)
    late = pool.submit(prompt="late", max_tokens=8000, temperature=0, ttl_ms=400)
    assert pool.wait_end(late, 5)[-1].error["code"] == "deadline_exceeded"
    held = pool.submit(prompt="held", max_tokens=100, temperature=0)
    pool.wait_tokens(held, 5)
    wrong.kill()
    pool.start(*QUIET)
    assert tools.text_of(pool.wait_end(held, 10)) == tools.answer("held", 100)

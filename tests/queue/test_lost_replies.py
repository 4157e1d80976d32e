"""Replies of Redis that never arrive: the job starts at once all the same, not when a lease has run out."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from headrace.lua_source import load_script
from headrace.messages import End

pytestmark = [pytest.mark.redis, pytest.mark.e2e]

LEASE_S = 60
PATIENCE_S = 25.0  # far less than a lease


class CuttingRelay:
    """Between a worker and Redis: closes a connection instead of handing on a reply that `cuts` names."""

    def __init__(self, server: tuple[str, int], cuts: Callable[[bytes, bytes], bool]) -> None:
        self._server, self._cuts = server, cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.lost = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                asked = bytearray()
                threading.Thread(target=self._ask, args=(client, server, asked), daemon=True).start()
                threading.Thread(target=self._answer, args=(client, server, asked), daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket, asked: bytearray) -> None:
        with suppress(OSError):
            while data := client.recv(65_536):
                asked += data
                server.sendall(data)
        server.close()

    def _answer(self, client: socket.socket, server: socket.socket, asked: bytearray) -> None:
        with suppress(OSError):
            while data := server.recv(65_536):
                request, asked[:] = bytes(asked), b""
                if self._cuts(request, data):
                    self.lost += 1
                    break
                client.sendall(data)
        for end in (client, server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def relay(redis_url: str) -> Iterator[Callable[..., CuttingRelay]]:
    relays: list[CuttingRelay] = []
    parts = urlsplit(redis_url)

    def make(cuts: Callable[[bytes, bytes], bool]) -> CuttingRelay:
        relays.append(CuttingRelay((parts.hostname or "127.0.0.1", parts.port or 6379), cuts))
        return relays[-1]

    yield make
    for each in relays:
        each.close()


def start_behind(relay: CuttingRelay, pool) -> None:
    url, pool.url = (
        pool.url,
        f"redis://127.0.0.1:{relay.address[1]}/{urlsplit(pool.url).path.strip('/') or 0}",
    )
    pool.start("--lease-ms", str(LEASE_S * 1000))
    pool.url = url


def assert_done_at_once(pool, relay: CuttingRelay, job_id: str, lost: int) -> None:
    events = pool.wait_end(job_id, PATIENCE_S)
    assert isinstance(events[-1], End)
    assert (events[-1].status, relay.lost) == ("done", lost)
    assert "history" not in pool.state(job_id)


def test_of_the_pick_that_found_the_job(pool, relay) -> None:
    cutting = relay(lambda request, reply: b"only once" in reply and cutting.lost == 0)
    start_behind(cutting, pool)
    job_id = pool.submit(prompt="only once", max_tokens=5)
    assert_done_at_once(pool, cutting, job_id, lost=1)
    assert pool.state(job_id)["attempt"] == "1"


def test_of_every_try_of_a_claim(pool, relay) -> None:
    """More often than the claim is repeated, so that its pick is, too."""
    claim = load_script("claim")
    texts = (claim.sha.encode(), claim.text.encode()[:200])
    cutting = relay(lambda request, _: any(t in request for t in texts) and cutting.lost < 6)
    start_behind(cutting, pool)
    job_id = pool.submit(prompt="hi", max_tokens=5)
    assert_done_at_once(pool, cutting, job_id, lost=6)

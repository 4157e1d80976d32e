"""The master of a service, by the word of its sentinels, and a thread that notices when it becomes another.

A master that was replaced while it lived goes on as one until the sentinels make it a replica, some ten
seconds later; what is written to it meanwhile is lost. So they are asked all the time, and it is left.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import redis
from redis.exceptions import RedisError

from headrace.places import Asks
from headrace.redis_url import Address

WATCH_S = 0.5


class Master:
    """A `Place`. One for all clients of a process that have the same sentinels and service."""

    master_only = True

    def __init__(self, sentinels: tuple[Address, ...], service: str) -> None:
        self._sentinels = list(sentinels)
        self._address: Address | None = None
        self._watch: threading.Thread | None = None
        self._lock = threading.Lock()
        self.query = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
        names = ", ".join(f"{host}:{port}" for host, port in sentinels)
        self.absent = f"no sentinel of {names} knows a master {service!r}"

    def known(self) -> Address | None:
        """Never: whoever connects asks anew."""
        return None

    def seeds(self) -> list[Address]:
        return list(self._sentinels)

    def read(self, reply: Any, asked: Address) -> Address | None:
        if not reply:
            return None
        self._address = (reply[0].decode(), int(reply[1]))
        # The one that answers is asked first the next time.
        self._sentinels = [asked, *(other for other in self._sentinels if other != asked)]
        return self._address

    def doubt(self) -> None:
        pass

    def arrived(self, asking: Asks) -> None:
        """Somebody is connected, and wants to know when the master is another."""
        with self._lock:
            if self._watch is None:
                arguments = (weakref.ref(self), asking)
                self._watch = threading.Thread(target=_watch, args=arguments, name="sentinels", daemon=True)
                self._watch.start()

    def left(self, address: Address) -> bool:
        return self._address is not None and self._address != address


_masters: weakref.WeakValueDictionary[tuple[tuple[Address, ...], str], Master] = weakref.WeakValueDictionary()


def master_of(sentinels: tuple[Address, ...], service: str) -> Master:
    found = _masters.get((sentinels, service))
    if found is None:
        found = _masters[sentinels, service] = Master(sentinels, service)
    return found


def _watch(wanted: weakref.ref[Master], asking: Asks) -> None:
    """Until nobody needs the master any more. Without a sentinel that answers, what was known holds.

    No frame may hold the master while a connection is used: the traces of redis-py's errors keep frames.
    """
    while (master := wanted()) is not None:
        seeds, query = master.seeds(), master.query
        del master
        for seed in seeds:
            connection = asking.connection_sync(seed)
            try:
                while _told(wanted, _asked(connection, query), seed):
                    time.sleep(WATCH_S)
            finally:
                connection.disconnect()
        time.sleep(WATCH_S)


def _asked(connection: redis.Connection, query: tuple[str, ...]) -> Any:
    try:
        connection.send_command(*query)
        return connection.read_response()
    except (RedisError, OSError):
        return None


def _told(wanted: weakref.ref[Master], reply: Any, asked: Address) -> bool:
    """Whether this sentinel knew it, and somebody wants to know it again."""
    master = wanted()
    return master is not None and master.read(reply, asked) is not None

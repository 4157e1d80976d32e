"""HTTP to addresses that strangers chose: public ones only, no redirects, little read, bounded in time.

A name is resolved here, every address it has is checked, and the connection goes to a checked address and no
other: what the name resolves to a moment later is never asked. TLS still checks the name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx

MAX_REPLY_BYTES = 16_384
REPLY_S = 1.0
MAX_ADDRESSES = 3
LOOKUP_THREADS = 32  # a name server that hangs keeps a thread each, for as long as the resolver waits
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ForbiddenAddressError(Exception):
    """The host has an address that webhooks do not go to. Trying again would not help."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    retry_after_s: float | None


def is_allowed(address: str, networks: Sequence[Network] = ()) -> bool:
    """Whether a connection may go there: a public address, or one inside `networks`."""
    found = _unwrapped(ipaddress.ip_address(address.partition("%")[0]))
    if any(found.version == network.version and found in network for network in networks):
        return True
    return found.is_global and not (found.is_multicast or found.is_reserved)


def _unwrapped(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one, where that is where packets would end."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo[1] if address.teredo else None
    return address.ipv4_mapped or address.sixtofour or teredo or address


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects by address after the check; the rest is httpcore's own."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._inner = httpcore.AnyIOBackend()
        self._networks = networks
        self._lookups = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="lookup")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        failure: Exception = httpcore.ConnectError("no address")
        for address in (await self._resolve(host, port))[:MAX_ADDRESSES]:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
                failure = exc
        raise failure

    async def _resolve(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._lookups, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        if not all(is_allowed(address, self._networks) for address in addresses):
            raise ForbiddenAddressError
        return addresses

    def close(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)


class Outbound:
    """Posts; at most `max_connections` at a time, each on a connection of its own."""

    def __init__(self, networks: Sequence[str], *, timeout_s: float, max_connections: int) -> None:
        self._backend = _CheckedBackend([ipaddress.ip_network(network) for network in networks])
        self._timeout_s = timeout_s
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(),
            max_connections=max_connections,
            max_keepalive_connections=0,
            network_backend=self._backend,
        )

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """The reply's status, redirects as they are. Raises ForbiddenAddressError, TimeoutError, OSError, and
        httpcore's and ValueError for what is no HTTP or no URL."""
        async with asyncio.timeout(self._timeout_s):
            return await self._post(httpx.URL(url), headers, body)

    async def _post(self, url: httpx.URL, headers: Mapping[str, str], body: bytes) -> Reply:
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path or b"/"
        )
        sent = {"host": url.netloc.decode(), "content-length": str(len(body)), **headers}
        async with self._pool.stream("POST", target, headers=list(sent.items()), content=body) as response:
            await _read_some(response)
            return Reply(response.status, _retry_after_s(response.headers))

    async def close(self) -> None:
        await self._pool.aclose()
        self._backend.close()


async def _read_some(response: httpcore.Response) -> None:
    """So that a short reply is not cut off. The status has said all: what goes wrong here changes nothing."""
    read = 0
    with suppress(httpcore.NetworkError, httpcore.ProtocolError, TimeoutError):
        async with asyncio.timeout(REPLY_S):
            async for chunk in response.aiter_stream():
                read += len(chunk)
                if read >= MAX_REPLY_BYTES:
                    return


def _retry_after_s(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    for name, value in headers:
        if name.lower() == b"retry-after" and value.strip().isdigit() and len(value) < 10:
            return float(value)
    return None

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import pytest

from gateway.tasks import outbound
from gateway.tasks.outbound import ForbiddenAddressError, Outbound, is_allowed


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1",
        "::ffff:127.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "ff02::1", "2001:db8::1",
    ],
)  # fmt: skip
def test_what_is_not_public_is_refused(address: str) -> None:
    assert not is_allowed(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::101:101"])
def test_what_is_public_is_allowed(address: str) -> None:
    assert is_allowed(address)


def test_a_network_can_be_allowed() -> None:
    networks = [ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fd00::/8")]
    assert is_allowed("10.1.2.3", networks)
    assert is_allowed("::ffff:10.1.2.3", networks)
    assert is_allowed("fd00::1", networks)
    assert not is_allowed("10.2.0.1", networks)


async def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in ("1.1.1.1", "10.0.0.1")]

    monkeypatch.setattr(outbound.socket, "getaddrinfo", resolve)
    out = Outbound((), timeout_s=2, max_connections=1)
    with pytest.raises(ForbiddenAddressError):
        await out.post("https://two-faced.example/", {}, b"")
    await out.close()


async def test_the_name_is_resolved_once_and_sent_as_it_is(
    endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(outbound.socket, "getaddrinfo", resolve)
    out = Outbound(("127.0.0.0/8",), timeout_s=2, max_connections=1)
    reply = await out.post(f"http://hook.example:{endpoint.port}/a?b=c", {"x": "y"}, b"body")
    await out.close()
    assert (reply.status, asked) == (200, ["hook.example"])
    (received,) = endpoint.received
    assert (received.path, received.headers["host"]) == ("/a?b=c", f"hook.example:{endpoint.port}")
    assert received.body == b"body"

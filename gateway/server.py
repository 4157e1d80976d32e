"""The HTTP server around the app: its socket, its patience with clients, its way of stopping."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from types import FrameType

import structlog
import uvicorn
from litestar.types import ASGIApp

from gateway.app import create_app
from gateway.protocol import BoundedProtocol
from headrace.config import ConfigError, GatewaySettings, redact_url

BACKLOG = 2048
STALLED_CLIENT_MS = 60_000
LAST_WORDS_S = 3.0  # after the time for draining
KEEP_ALIVE_IDLE_S = 20
KEEP_ALIVE_S = 75  # longer than clients and proxies keep theirs, so that they close first
log = structlog.get_logger("headrace.gateway")


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket. Raises ConfigError when the address is unknown or taken."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as exc:
        raise ConfigError(f"HEADRACE_HOST={host}: {exc.strerror or exc}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _drop_dead_clients(sock)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise ConfigError(f"HEADRACE_PORT={port}: cannot listen on {host}: {exc.strerror or exc}") from None
    return sock


def _drop_dead_clients(sock: socket.socket) -> None:
    # Accepted connections inherit these. The kernel then ends those whose peer is gone or reads
    # nothing at all: `send` would wait for them for ever.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_CLIENT_MS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_IDLE_S)


class DrainingServer(uvicorn.Server):
    """Lets what is open come to its end, for a while; what has not by then is told so and ended."""

    def __init__(self, config: uvicorn.Config, drain_s: float) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._ended = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the draining, the second ends it, a third leaves all as it is."""
        if self.should_exit and self._drain_s:
            self._drain_s = 0.0
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._end_requests)
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("draining", open_requests=len(self.server_state.tasks), limit_s=self._drain_s)
        self._loop = asyncio.get_running_loop()
        timer = self._loop.call_later(self._drain_s, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
        log.info("stopped", ended_requests=self._ended)

    def _end_requests(self) -> None:
        self._ended += len(self.server_state.tasks)
        for task in self.server_state.tasks:
            task.cancel()


def make_server(app: ASGIApp, settings: GatewaySettings) -> DrainingServer:
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s + LAST_WORDS_S),
    )
    return DrainingServer(config, settings.drain_timeout_s)


def run(settings: GatewaySettings) -> int:
    """Serves until SIGTERM or SIGINT, then lets open streams end within `drain_timeout_s`."""
    sock = listen(settings.host, settings.port)
    server = make_server(create_app(settings), settings)

    def stop(_: int, __: FrameType | None) -> None:
        # uvicorn raises its signal again when it has stopped; before it has started, this is all there is.
        if not server.started:
            raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    host, port = sock.getsockname()[:2]
    log.info(
        "listening", url=f"http://{host}:{port}", pool=settings.pool, redis=redact_url(settings.redis_url)
    )
    with sock:
        server.run(sockets=[sock])
    return 0 if server.started else 1

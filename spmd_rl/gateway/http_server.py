"""HTTP server of the gateway: one socket that listens, in the event loop that enters it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spmd_rl.errors import ConfigError
from spmd_rl.gateway.answers import KB, SHOWN
from spmd_rl.gateway.config import GatewayConfig

BACKLOG = 4096  # connections that wait to be accepted
CLOSE_S = 2  # for requests that still run when the server closes


class HttpServer:
    """Serves an app at `port`, or at a free port that the system chooses.

    It listens as soon as it is made, and answers while it is entered.
    Raises: ConfigError where it cannot listen there.
    """

    def __init__(self, config: GatewayConfig, port: int = 0) -> None:
        self._config = config
        self._listener = _listen(config.host, port)
        self._server: _Server
        self._task: asyncio.Task[None]
        host, bound = self._listener.getsockname()[:2]
        self.root_url = f"http://{f'[{host}]' if ':' in host else host}:{bound}"

    async def start(self, app: Any) -> None:
        """Serve an app. Blocks: until it answers."""
        self._server = _Server(app, self._config)
        self._task = asyncio.get_running_loop().create_task(self._server.serve([self._listener]))
        await self._server.ready.wait()

    async def close(self) -> None:
        """Stop. Blocks: until requests have ended, for at most `CLOSE_S`."""
        self._server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    """A server that leaves the signals of its process alone. `ready` is set once it listens."""

    def __init__(self, app: Any, config: GatewayConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_guarded_by(config),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,  # a path may hold a key
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=int(config.keep_alive_s),
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


class GuardedProtocol(HttpToolsProtocol):
    """A connection whose requests must begin in time, with a head that is not too large.

    `strangers` are those that have shown no key, the oldest first. Where there are too many
    connections, the oldest stranger is closed.
    """

    limits: ClassVar[GatewayConfig]
    strangers: ClassVar[dict[GuardedProtocol, None]]
    _num_head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self.client is None or not self.limits.admits(self.client[0]):
            transport.abort()
            return
        self.strangers[self] = None
        self._expect_head()
        if len(self.connections) > self.limits.max_connections:
            next(iter(self.strangers)).give_way()

    def give_way(self) -> None:
        """Close the connection at once, because there are too many."""
        self.strangers.pop(self, None)
        self.connections.discard(self)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.strangers.pop(self, None)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._num_head_bytes > self.limits.max_header_kb * KB:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope = cast("dict[str, Any]", self.scope)
        scope[SHOWN] = lambda: self.strangers.pop(self, None)
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._in_head, self._num_head_bytes = True, 0
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.limits.request_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _guarded_by(config: GatewayConfig) -> type[GuardedProtocol]:
    """Return the protocol with these limits."""
    return type("LimitedProtocol", (GuardedProtocol,), {"limits": config, "strangers": {}})


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises: ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        where = f"{host}, port {port}" if port else host
        raise ConfigError(f"the gateway cannot listen at {where}: {error.strerror}") from error
    listener.setblocking(False)
    return listener

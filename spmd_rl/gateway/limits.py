"""Limits of a connection and of a request: how large it may be, and how long it may take."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.gateway.dialects.asked import Refused

KB, MB = 1 << 10, 1 << 20
SHOWN = "spmd_rl.key_shown"  # of a request's scope: what to call once it has shown a key


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


def guarded_by(config: GatewayConfig) -> type[GuardedProtocol]:
    """Return the protocol with these limits."""
    return type("LimitedProtocol", (GuardedProtocol,), {"limits": config, "strangers": {}})


async def whole_body(scope: Any, receive: Any, config: GatewayConfig) -> bytes:
    """Return the body of a request.

    Blocks: until the body is there, for at most `request_s`.
    Raises: Refused for a body that is too large, too slow or not complete.
    """
    most = config.max_body_mb * MB
    too_large = Refused("", f"the body has more than {config.max_body_mb} MB", status=413)
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > most:
            raise too_large
        if name == b"content-encoding" and value.lower() != b"identity":
            raise Refused("", "send the body without compression", status=415)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.request_s):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise Refused("", "the client has left")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise too_large
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError as error:
        problem = f"the body did not come within {config.request_s:g} s"
        raise Refused("", problem, status=408) from error

"""A gateway with an engine of the tests, and raw connections to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple

from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.gateway.dialects.request import SamplingRules
from spmd_rl.gateway.process import Gateway
from spmd_rl.gateway.replies import ReplyFormat
from spmd_rl.gateway.session import Session
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.program import Site
from tests.unit.gateway.fakes import CALL_FORM, FakeEngine, FakeTexts, prompt_of

END = "<|end|>"
AsyncTest = Callable[..., Awaitable[None]]
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


class Answer(NamedTuple):
    """A response: status, headers with small names, and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        lines = self.body.decode().split("\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(line) for line in data if line != "[DONE]"]


class Served(NamedTuple):
    """A gateway with one open session."""

    gateway: Gateway
    session: Session
    engine: FakeEngine

    @property
    def port(self) -> int:
        return int(self.gateway.root_url.rpartition(":")[2])

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def post(self, path: str, body: Any, key: str | None = None, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send("POST", path, data, key, **headers)

    async def send(
        self, method: str, path: str, data: bytes = b"", key: str | None = None, **headers: str
    ) -> Answer:
        """Send a request on a connection of its own and read the whole response."""
        reader, writer = await self.connect()
        try:
            writer.write(self.head(method, path, len(data), key, **headers) + data)
            return await read_answer(reader)
        finally:
            writer.close()

    def head(
        self, method: str, path: str, size: int, key: str | None = None, **headers: str
    ) -> bytes:
        key = self.session.key if key is None else key
        given = {"authorization": f"Bearer {key}", "content-length": str(size), "host": "x"}
        given |= {"connection": "close"} | {k.replace("_", "-"): v for k, v in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in given.items() if v)]
        return "\r\n".join([*lines, "", ""]).encode()


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """Read a response to the end of its connection."""
    data = await reader.read(-1)
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _unchunked(body)
    return Answer(int(first.split()[1]) if first else 0, headers, body)


def _unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(parts)


@asynccontextmanager
async def serving(replies: Any = None, texts: Any = None, **config: Any) -> AsyncIterator[Served]:
    """Serve one session, whose calls have a form of the tests."""
    texts = texts or FakeTexts()
    engine: Any = FakeEngine(texts, replies if replies is not None else lambda _: "yes" + END)
    site = Site({}, 0, "/models/tiny", texts)
    async with Gateway(GatewayConfig(**config), site) as gateway:
        parts = gateway.parts
        object.__setattr__(parts, "replies", ReplyFormat(CALL_FORM))
        session = gateway.open(HookContext(version=3), prompt_of(), engine, SamplingRules(1.0, 1.0))
        yield Served(gateway, session, engine)
        session.close()


def with_gateway(replies: Any = None, **config: Any) -> Callable[[AsyncTest], Callable[..., None]]:
    """Run an async test, whose first argument is a gateway that serves one session."""

    def decorate(test: AsyncTest) -> Callable[..., None]:
        async def play(**given: Any) -> None:
            async with serving(replies, **config) as served:
                await test(served, **given)

        @wraps(test)
        def run(**given: Any) -> None:
            asyncio.run(play(**given))

        own = signature(test)
        _, *others = own.parameters.values()
        run.__signature__ = own.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate

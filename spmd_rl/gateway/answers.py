"""Bodies of requests, and answers: JSON, and errors in the form that a client knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from spmd_rl.data.logs.form import Json
from spmd_rl.errors import SpmdError
from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.gateway.dialects.request import Refused

KB, MB = 1 << 10, 1 << 20
SHOWN = "spmd_rl.key_shown"  # of a request's scope: what to call once it has shown a key
Headers = list[tuple[bytes, bytes]]
Send = Callable[[Any], Any]


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


async def send_json(send: Send, status: int, body: Any, headers: Iterable[Any] = ()) -> None:
    """Send an answer as JSON."""
    kind = (b"content-type", b"application/json")
    await send_body(send, status, msgspec.json.encode(body), [kind, *headers])


async def send_body(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Send an answer as a whole."""
    size = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [size, *headers]})
    await send({"type": "http.response.body", "body": body})


_ANTHROPIC = {400: "invalid_request_error", 401: "authentication_error", 413: "request_too_large"}
_ANTHROPIC |= {429: "rate_limit_error", 408: "timeout_error", 404: "not_found_error"}
_ANTHROPIC |= {405: "invalid_request_error"}


async def send_error(scope: Any, send: Send, error: SpmdError) -> None:
    """Tell a client why there is no answer, in the form that it knows."""
    refused = error if isinstance(error, Refused) else Refused("", str(error), status=500)
    status, text = refused.status, str(refused)
    if "/v1/messages" in scope["path"]:
        kind = _ANTHROPIC.get(status, "api_error")
        body: Json = {"type": "error", "error": {"type": kind, "message": text}}
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
        facts = {"message": text, "type": kind, "param": refused.field or None}
        body = {"error": facts | {"code": refused.code or None}}
    headers: Headers = []
    if refused.allowed:
        headers.append((b"allow", ", ".join(refused.allowed).encode()))
    if refused.retry_after_s:
        headers.append((b"retry-after", str(refused.retry_after_s).encode()))
    if status in (408, 413, 415):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    if status == 500:
        headers.append((b"x-should-retry", b"false"))
    await send_json(send, status, body, headers)

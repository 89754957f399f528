"""Answers of the gateway over HTTP: JSON, and errors in the form that a client knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from spmd_rl.data.logs.form import Json
from spmd_rl.errors import SpmdError
from spmd_rl.gateway.dialects.asked import Refused

Headers = list[tuple[bytes, bytes]]
Send = Callable[[Any], Any]


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


async def send_error(
    scope: Any, send: Send, error: SpmdError, more: Mapping[str, str] | None = None
) -> None:
    """Tell a client why there is no answer, in the form that it knows, with `more` headers."""
    refused = error if isinstance(error, Refused) else Refused("", str(error), status=500)
    status, text = refused.status, str(refused)
    if "/v1/messages" in scope["path"]:
        kind = _ANTHROPIC.get(status, "api_error")
        body: Json = {"type": "error", "error": {"type": kind, "message": text}}
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
        facts = {"message": text, "type": kind, "param": refused.field or None}
        body = {"error": facts | {"code": refused.code or None}}
    headers = [(name.lower().encode(), value.encode()) for name, value in (more or {}).items()]
    if refused.retry_after_s:
        headers.append((b"retry-after", str(refused.retry_after_s).encode()))
    if status in (408, 413, 415):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    if status == 500:
        headers.append((b"x-should-retry", b"false"))
    await send_json(send, status, body, headers)

"""JSON over HTTP for graders: bounded retries with jitter, and one deadline for all of them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.rewards.config import Patience
from spmd_rl.rewards.deadline import uncounted

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

AWAY = {502, 503, 504}  # statuses of a server that starts, or of one before it
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 8.0  # before a retry, at most; each wait doubles
MAX_ANSWER_BYTES = 4 << 20
RETRIED = {408, 409, 425, 429}  # statuses below 500 that a later request may not get
_PREVIEW = 200  # characters


class ServerError(SpmdError):
    """A server gave no answer that can be used. The text says what it did at last."""


class _Retried(Exception):
    """What went wrong, after which another request may help."""


class _Away(_Retried):
    """Nobody is there, or not yet."""


@dataclass(frozen=True)
class HttpRequest:
    """A JSON body for a URL, which the server is asked as long as `patience` says."""

    url: str
    body: bytes
    headers: Mapping[str, str]
    patience: Patience


_CLIENTS: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()


def check_httpx() -> None:
    """Raise a ConfigError unless httpx is installed."""
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "the rewards 'remote' and 'judge' need httpx: pip install -e '.[rewards]' in the "
            "repository of spmd_rl"
        ) from error


def header_values(variables: Mapping[str, str], setting: str) -> dict[str, str]:
    """Return headers by name, of which `variables` names the environment variables.

    Raises: ConfigError for a variable that is not set, or holds what no header may.
    """
    values = {}
    for header, variable in variables.items():
        value = os.environ.get(variable, "").strip()
        if not value:
            raise ConfigError(
                f"{setting} reads {header} from the environment variable {variable}, "
                "which is not set"
            )
        if not (value.isascii() and value.isprintable()):  # httpx would show it in its error
            raise ConfigError(
                f"{setting}: the environment variable {variable} holds more than one line, or "
                "letters beyond ASCII"
            )
        values[header] = value
    return values


async def ask(request: HttpRequest, read: Callable[[bytes], T]) -> T:
    """Post the body until `read` returns something for an answer, and return that.

    `read` raises ValueError for an answer that makes no sense; the server is then asked again.
    One that is away is waited for, and the deadline begins anew when it is back. The time of this
    does not count for the deadline of a hook.
    Raises: ServerError after the last request, for a status that says that none will help, at the
    deadline, and when the server was away for too long.
    """
    patience = request.patience
    last, clock = "no answer yet", asyncio.get_running_loop().time
    num_failed = num_away = 0
    away_since_s = 0.0
    try:
        with uncounted():
            async with asyncio.timeout(patience.deadline_s) as limit:
                while num_failed <= patience.retries:
                    try:
                        return await _ask_once(request, read)
                    except _Away as error:
                        last, num_away = str(error), num_away + 1
                        away_since_s = away_since_s if num_away > 1 else clock()
                        if clock() - away_since_s >= patience.away_s:
                            raise ServerError(
                                f"{request.url} was away for {patience.away_s:g} s, at last: {last}"
                            ) from error
                    except _Retried as error:
                        last, num_failed, num_away = str(error), num_failed + 1, 0
                    wait_s = _wait_s(num_failed + num_away)
                    if num_away:
                        limit.reschedule(clock() + wait_s + patience.deadline_s)
                    if num_failed <= patience.retries:
                        await asyncio.sleep(wait_s)
    except TimeoutError as error:
        raise ServerError(
            f"{request.url} gave no answer in {patience.deadline_s:g} s, at last: {last}"
        ) from error
    raise ServerError(f"{request.url} failed {num_failed} times, at last: {last}")


def _wait_s(attempt: int) -> float:
    """Return the random wait before another attempt, of which there were so many."""
    return random.uniform(0.0, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(attempt, 30)))


async def _ask_once(request: HttpRequest, read: Callable[[bytes], T]) -> T:
    import httpx

    try:
        async with _client().stream(
            "POST", request.url, content=request.body, headers=dict(request.headers)
        ) as response:
            answer = await _bounded(response)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise _Away(f"{type(error).__name__} {error}".strip()) from error
    except (httpx.TransportError, httpx.DecodingError) as error:
        raise _Retried(f"{type(error).__name__} {error}".strip()) from error
    status = response.status_code
    if status in AWAY:
        raise _Away(f"HTTP status {status}: {_preview(answer)}")
    if status >= 500 or status in RETRIED:
        raise _Retried(f"HTTP status {status}: {_preview(answer)}")
    if status != 200:
        raise ServerError(f"{request.url} answers with HTTP status {status}: {_preview(answer)}")
    try:
        return read(answer)
    except ValueError as error:
        raise _Retried(f"{error}: {_preview(answer)}") from error


async def _bounded(response: httpx.Response) -> bytes:
    answer = bytearray()
    async for piece in response.aiter_bytes():
        answer += piece
        if len(answer) > MAX_ANSWER_BYTES:
            raise _Retried(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(answer)


def _client() -> httpx.AsyncClient:
    """Return the client of this event loop, whose time `ask` bounds; it keeps its connections."""
    import httpx

    loop = asyncio.get_running_loop()
    if loop not in _CLIENTS:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        _CLIENTS[loop] = httpx.AsyncClient(timeout=None, limits=limits, headers=headers)
    return _CLIENTS[loop]


def as_json(value: Any) -> bytes:
    """Return a value as JSON; what JSON lacks is written as Python shows it."""
    return msgspec.json.encode(value, enc_hook=repr)


def _preview(answer: bytes) -> str:
    return repr(answer[:_PREVIEW].decode(errors="replace"))

"""Session of an OpenEnv server: one WebSocket, for which the server makes an environment.

Source: openenv-core 0.3.0, `openenv.core.env_server.http_server`.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.hooks.failures import EpisodeFailure

PACKAGE = "websockets>=15.0.1,<18"
CONNECT_S, CLOSE_S = 10.0, 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between tries to get a place of other processes
MAX_MESSAGE_BYTES = 64 << 20
MAX_TOLD = 400  # characters of what a server says
NO_PLACE = "CAPACITY_REACHED"
INVALID = "VALIDATION_ERROR"


class OpenEnvError(SpmdError):
    """An OpenEnv server has answered with an error. `code` is that of its protocol."""

    def __init__(self, code: str, problem: str) -> None:
        super().__init__(f"the OpenEnv server says {code}: {problem[:MAX_TOLD]}")
        self.code = code


class Shown(NamedTuple):
    """What a server answers to `reset` and to `step`."""

    observation: dict[str, Any]
    reward: float
    done: bool


class OpenEnvServer:
    """A server of environments, which all episodes of a process share.

    `call_s` is the longest that a call may take. A server has places for some sessions at once, and
    `place_s` is how long an episode waits for one.
    """

    def __init__(self, address: str, call_s: float, place_s: float) -> None:
        self.call_s, self.place_s = call_s, place_s
        self._http, self.socket_url = addresses_of(address)
        self._schema: dict[str, Any] | None = None
        self._reading = asyncio.Lock()
        self._waiting: deque[asyncio.Event] = deque()  # sessions without a place

    async def action_schema(self) -> dict[str, Any]:
        """Return the JSON schema of the server's actions, which is read once.

        Raises: EpisodeFailure where the server does not tell it.
        """
        async with self._reading:
            if self._schema is None:
                self._schema = await asyncio.to_thread(self._read_schema)
        return self._schema

    def _read_schema(self) -> dict[str, Any]:
        url = f"{self._http}/schema"
        try:
            with _opener(url).open(url, timeout=self.call_s) as answer:
                return dict(json.load(answer)["action"])
        except TimeoutError as error:
            raise EpisodeFailure("timeout", f"{url} did not answer: {error}") from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise EpisodeFailure("environment", f"{url} cannot be read: {error}") from error

    def session(self) -> OpenEnvSession:
        """Return a session, which is connected by its first call."""
        return OpenEnvSession(self)

    async def wait_for_place(self, most_s: float) -> None:
        """Wait until a session of this process has given its place back, or for so long."""
        free = asyncio.Event()
        self._waiting.append(free)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(free.wait(), most_s)
        finally:
            if free in self._waiting:
                self._waiting.remove(free)

    def place_is_free(self) -> None:
        """Let the session try that has waited for the longest."""
        if self._waiting:
            self._waiting.popleft().set()


class OpenEnvSession:
    """One environment of a server. The calls come one after the other."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._socket: Any = None

    async def reset(self, params: Mapping[str, Any]) -> Shown:
        """Begin an episode, as soon as the server has a place for it.

        Raises: EpisodeFailure where it cannot be reached, or no place comes free in time.
        """
        pause_s, loop = FIRST_PAUSE_S, asyncio.get_running_loop()
        end = loop.time() + self._server.place_s
        while True:
            try:
                return _shown(await self._call("reset", params))
            except OpenEnvError as error:
                if error.code != NO_PLACE:
                    raise EpisodeFailure("environment", str(error)) from error
                if loop.time() + pause_s > end:
                    problem = f"no place came free in {self._server.place_s:g} s: {error}"
                    raise EpisodeFailure("timeout", problem) from error
            await self._leave()
            await self._server.wait_for_place(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def step(self, action: Mapping[str, Any]) -> Shown:
        """Act. Raises: OpenEnvError for what the server refuses; EpisodeFailure."""
        return _shown(await self._call("step", action))

    async def state(self) -> dict[str, Any]:
        """Return the state of the environment. Raises: OpenEnvError, EpisodeFailure."""
        return await self._call("state", None)

    async def close(self) -> None:
        """Give the place back. It waits for the server for two seconds at most."""
        if self._socket is not None:
            await self._leave()
            self._server.place_is_free()

    async def _leave(self) -> None:
        socket, self._socket = self._socket, None
        # a server that is gone, or does not answer, has given the place back or never will
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_S):
                await socket.send(json.dumps({"type": "close"}))
                await socket.wait_closed()  # the server closes when it has given the place back
        socket.transport.abort()

    async def _call(self, kind: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
        """Send a message and return the data of its answer."""
        if self._socket is None:
            self._socket = await self._connected()
        message = {"type": kind} | ({} if data is None else {"data": dict(data)})
        try:
            async with asyncio.timeout(self._server.call_s):
                text = await self._exchanged(json.dumps(message))
        except TimeoutError as error:
            problem = f"{kind} did not answer within {self._server.call_s:g} s"
            raise EpisodeFailure("timeout", problem) from error
        return _data_of(kind, text)

    async def _exchanged(self, text: str) -> str | bytes:
        """Return the answer to a message. Raises: EpisodeFailure where the connection is lost."""
        from websockets.exceptions import ConnectionClosed

        # a server without a place says so and closes, perhaps before the message is there
        with suppress(ConnectionClosed):
            await self._socket.send(text)
        try:
            answer: str | bytes = await self._socket.recv()
        except ConnectionClosed as error:
            problem = f"the OpenEnv server has closed the connection: {error}"
            raise EpisodeFailure("environment", problem) from error
        return answer

    async def _connected(self) -> Any:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        url = self._server.socket_url
        try:
            return await connect(
                url,
                open_timeout=CONNECT_S,
                close_timeout=CLOSE_S,
                ping_interval=None,  # call_s says how long an answer may take
                max_size=MAX_MESSAGE_BYTES,
                proxy=None if _is_local(url) else True,
            )
        except TimeoutError as error:
            raise EpisodeFailure("timeout", f"{url} did not answer in {CONNECT_S:g} s") from error
        except (OSError, WebSocketException) as error:
            raise EpisodeFailure("environment", f"cannot connect to {url}: {error}") from error


def addresses_of(address: str) -> tuple[str, str]:
    """Return the address of a server for HTTP, and that of its WebSocket. Raises: ConfigError."""
    parts = urlsplit(address.rstrip("/"))
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if parts.scheme not in schemes or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(
            f"agent.name = {address!r}: expected the address of an OpenEnv server, such as "
            "http://127.0.0.1:8000"
        )
    socket = parts._replace(scheme=schemes[parts.scheme])
    http = parts._replace(scheme="https" if socket.scheme == "wss" else "http")
    return http.geturl(), f"{socket.geturl()}/ws"


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Return what opens a URL. Addresses of this machine need no proxy."""
    proxies = [urllib.request.ProxyHandler({})] if _is_local(url) else []
    return urllib.request.build_opener(*proxies)


def _data_of(kind: str, text: str | bytes) -> dict[str, Any]:
    """Return the data of an answer. Raises: OpenEnvError for an error, else EpisodeFailure."""
    expected = "state" if kind == "state" else "observation"
    try:
        answer = json.loads(text)
        name, data = answer["type"], answer["data"]
        if name == "error":
            told = {key: value for key, value in data.items() if key not in ("code", "message")}
            problem = str(data.get("message", "")) + (f" {json.dumps(told)}" if told else "")
            raise OpenEnvError(str(data.get("code", "")), problem)
        if name != expected or not isinstance(data, dict):
            raise ValueError(f"the answer is {name!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{kind} got an answer that is not OpenEnv's: {error}"
        raise EpisodeFailure("environment", problem) from error
    return dict(data)


def _shown(data: Mapping[str, Any]) -> Shown:
    """Return an observation. Raises: EpisodeFailure for what is none."""
    observation, reward = data.get("observation"), data.get("reward")
    is_number = reward is None or isinstance(reward, (bool, int, float))
    if not isinstance(observation, dict) or not is_number:
        problem = f"the OpenEnv server has sent no observation: {json.dumps(data)[:MAX_TOLD]}"
        raise EpisodeFailure("environment", problem)
    return Shown(observation, float(reward or 0), bool(data.get("done")))

"""HTTP routes of the gateway: who may ask, what is asked, and the answer in the same dialect."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

import numpy as np

from spmd_rl.data.logs.form import Json
from spmd_rl.errors import SpmdError
from spmd_rl.gateway import sse
from spmd_rl.gateway.answers import (
    SHOWN,
    Headers,
    Send,
    send_body,
    send_error,
    send_json,
    whole_body,
)
from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.gateway.dialects import chat, completions, messages, responses, tokens
from spmd_rl.gateway.dialects.fields import read_body
from spmd_rl.gateway.dialects.request import (
    PolicyReply,
    Refused,
    ReplyRequest,
    ReplyStart,
    SamplingRules,
)
from spmd_rl.gateway.plan import SessionParts
from spmd_rl.gateway.replies import ReplyPiece
from spmd_rl.gateway.reply_call import ReplyCall
from spmd_rl.gateway.session import Session
from spmd_rl.gateway.sessions import key_of

_PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"
_NO_NAME = re.compile(r"[^\w.\[\]-]", re.ASCII)
MODELS = "/v1/models"
MAX_IGNORED, MAX_NAME = 32, 64  # names of ignored fields in a header, and characters of one


class EventStream(Protocol):
    """Events of one reply in a dialect."""

    def start(self) -> Iterable[bytes]: ...
    def piece(self, piece: ReplyPiece) -> Iterable[bytes]: ...
    def end(self, drawn: PolicyReply) -> Iterable[bytes]: ...
    def failed(self, error: SpmdError) -> Iterable[bytes]: ...


class SessionFinder(Protocol):
    """Sessions by what a request brings."""

    @property
    def parts(self) -> SessionParts: ...

    def find(self, key: str, name: str = "") -> Session:
        """Return the session of a key and of the client's name for it. Raises: Refused."""
        ...


StreamOf = Callable[[ReplyRequest, ReplyStart], EventStream]
Reader = Callable[[Json, SamplingRules], ReplyRequest]


class Dialect(NamedTuple):
    """A dialect of requests. One without `stream` answers as a whole."""

    read: Reader
    answer: Callable[[ReplyRequest, PolicyReply], Json]
    stream: StreamOf | None = None


CHAT = Dialect(chat.read, chat.answer, chat.ChatStream)
COMPLETIONS = Dialect(completions.read, completions.answer, completions.CompletionStream)
RESPONSES = Dialect(responses.read, responses.answer, responses.ResponseStream)
MESSAGES = Dialect(messages.read, messages.answer, messages.MessageStream)
TOKENS = Dialect(tokens.read, tokens.answer)
DIALECTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/inference/v1/generate": TOKENS,
}


class App:
    """The gateway's ASGI app. Each path of a client also exists below `/s/KEY`."""

    def __init__(self, sessions: SessionFinder) -> None:
        self._ends: dict[str, _Endpoint] = {
            **{path: _ReplyEndpoint(sessions, one) for path, one in DIALECTS.items()},
            "/v1/messages/count_tokens": _CountEndpoint(sessions),
            MODELS: _ModelsEndpoint(sessions),
            "/health": _HealthEndpoint(sessions),
            "/metrics": _MetricsEndpoint(sessions),
        }

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Answer a request. What an endpoint raises beside its own errors is raised again."""
        begun = False

        async def noting(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            end = self._endpoint(scope)
        except Refused as error:
            await send_error(scope, send, error)
            return
        try:
            await end(scope, receive, noting)
        except Exception:
            if not begun:
                await send_error(scope, send, SpmdError("this server has failed"))
            raise

    def _endpoint(self, scope: Any) -> _Endpoint:
        """Return what answers, and put the path's parameters into `scope`. Raises: Refused."""
        path, key, model = scope["path"], "", ""
        if path.startswith("/s/"):
            key, slash, rest = path[3:].partition("/")
            path = slash + rest if key else ""
        if path.startswith(f"{MODELS}/"):
            path, model = MODELS, path[len(MODELS) + 1 :]
        end = self._ends.get(path)
        if end is None:
            known = f"there are {', '.join(DIALECTS)} and {MODELS}"
            raise Refused("", f"no endpoint has this path: {known}", status=404)
        if scope["method"] not in end.methods:
            problem = f"this endpoint does not take {scope['method']}"
            raise Refused("", problem, status=405, allowed=end.methods)
        scope["path_params"] = {"key": key, "model": model}
        return end


class _Endpoint:
    """An endpoint that answers with JSON, and with an error in the form of its clients."""

    methods: tuple[str, ...] = ("GET", "HEAD")

    def __init__(self, sessions: SessionFinder) -> None:
        self.sessions = sessions
        self.config: GatewayConfig = sessions.parts.config

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        try:
            await self.serve(scope, receive, send)
        except SpmdError as error:
            await send_error(scope, send, error)

    async def serve(self, scope: Any, receive: Any, send: Send) -> None:
        raise NotImplementedError

    def session(self, scope: Any) -> Session:
        """Return the session of a request. Raises: Refused."""
        headers = scope["headers"]
        name = dict(headers).get(b"x-session-id", b"").decode("latin-1")
        session = self.sessions.find(key_of(scope["path_params"]["key"], headers), name)
        scope[SHOWN]()
        return session

    async def asked(self, read: Reader, body: bytes, rules: SamplingRules) -> ReplyRequest:
        """Return what a body asks for, with the names of all that is ignored. Raises: Refused."""
        return await self.sessions.parts.work(len(body), self._read, read, body, rules)

    def _read(self, read: Reader, body: bytes, rules: SamplingRules) -> ReplyRequest:
        asked = read(read_body(body), rules)
        parts = self.sessions.parts
        if asked.unknown and self.config.unknown_fields == "refuse":
            problem = "this gateway does not know the field, and refuses it by "
            raise Refused(asked.unknown[0], f"{problem}{parts.settings}.unknown_fields")
        unread = parts.texts.unread(asked.extras.template_kwargs)
        names = (f"chat_template_kwargs.{name}" for name in unread)
        return replace(asked, ignored=(*asked.ignored, *asked.unknown, *names))


class _HealthEndpoint(_Endpoint):
    async def serve(self, scope: Any, receive: Any, send: Send) -> None:
        await send_json(send, 200, {"status": "ok"})


class _MetricsEndpoint(_Endpoint):
    async def serve(self, scope: Any, receive: Any, send: Send) -> None:
        text = self.sessions.parts.counts.text().encode()
        await send_body(send, 200, text, [(b"content-type", _PROMETHEUS)])


class _ModelsEndpoint(_Endpoint):
    async def serve(self, scope: Any, receive: Any, send: Send) -> None:
        self.session(scope)
        parts = self.sessions.parts
        facts = {"id": parts.model, "object": "model", "created": 0, "owned_by": "spmd_rl"}
        facts["max_model_len"] = parts.texts.context_tokens
        one = scope["path_params"]["model"]
        await send_json(send, 200, facts if one else {"object": "list", "data": [facts]})


class _CountEndpoint(_Endpoint):
    methods = ("POST",)

    async def serve(self, scope: Any, receive: Any, send: Send) -> None:
        session = self.session(scope)
        body = await whole_body(scope, receive, self.config)
        asked = await self.asked(messages.read_counted, body, session.rules)
        count = await self.sessions.parts.work(len(body), session.count_tokens, asked)
        await send_json(send, 200, {"input_tokens": count}, _ignored(asked))


class _ReplyEndpoint(_Endpoint):
    """An endpoint at which the policy draws a reply."""

    methods = ("POST",)

    def __init__(self, sessions: SessionFinder, dialect: Dialect) -> None:
        super().__init__(sessions)
        self._dialect = dialect

    async def serve(self, scope: Any, receive: Any, send: Send) -> None:
        session = self.session(scope)
        body = await whole_body(scope, receive, self.config)
        asked = await self.asked(self._dialect.read, body, session.rules)
        named, again = _retry(scope["headers"])
        path = scope["path"].rpartition("/")[2].encode()
        request = sha256(b"\n".join((path, named, body))).digest()
        calls: list[ReplyCall] = []
        tasks: list[asyncio.Future[None]] = []
        answered = False
        try:
            for one in (asked, *asked.more):
                name = request + b"%d" % one.choice
                calls.append(session.ask(one, name, again=again, num_bytes=len(body)))
                calls[-1].join()
            tasks += [asyncio.ensure_future(_until_gone(receive))]
            tasks += [asyncio.ensure_future(self._answer(session, calls, send))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if answered := tasks[1].done():
                tasks[1].result()
        finally:
            for task in tasks:
                task.cancel()
            for call in calls:
                session.leave(call, answered=answered)

    async def _answer(self, session: Session, calls: list[ReplyCall], send: Send) -> None:
        """Send what was drawn, as a stream or as a whole. Raises: SpmdError."""
        asked, make = calls[0].asked, self._dialect.stream
        if asked.stream and make is not None and (begun := await _begun(calls[0])):
            await self._send_events(session, calls[0], make(asked, begun), send)
            return
        drawn = await _all_drawn(calls)
        versions = np.concatenate([one.data.versions for one in drawn])
        span = [int(versions.min()), int(versions.max())] if len(versions) else [session.version]
        answers = [
            self._dialect.answer(call.asked, one) for call, one in zip(calls, drawn, strict=True)
        ]
        await send_json(send, 200, chat.joined(asked, answers), _headers(asked, span))

    async def _send_events(
        self, session: Session, call: ReplyCall, stream: EventStream, send: Send
    ) -> None:
        headers = [*sse.HEADERS, *_headers(call.asked, [session.version])]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(parts: Iterable[bytes]) -> None:
            body = {"type": "http.response.body", "body": b"".join(parts), "more_body": True}
            async with asyncio.timeout(self.config.request_s):  # for a client that does not read
                await send(body)

        try:
            await write(stream.start())
            async for piece in call.pieces(self.config.heartbeat_s):
                await write([sse.KEEP_ALIVE] if piece is None else stream.piece(piece))
            try:
                last = stream.end(await _outcome(call))
            except SpmdError as error:
                last = stream.failed(error)
            await write(last)
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            return  # the connection is closed, as the response has no end


async def _begun(call: ReplyCall) -> ReplyStart | None:
    """Return the first facts of a reply; None where the call ended before it had begun."""
    waited: list[asyncio.Future[Any]] = [call.begun, call.task]
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    is_begun = call.begun.done() and not call.begun.cancelled()
    return call.begun.result() if is_begun else None


async def _all_drawn(calls: list[ReplyCall]) -> list[PolicyReply]:
    """Return what all calls drew. Raises: SpmdError, as soon as one of them has failed."""
    waited = [call.task for call in calls]
    await asyncio.wait(waited, return_when=asyncio.FIRST_EXCEPTION)
    ended = [await _outcome(call) for call in calls if call.task.done()]
    assert len(ended) == len(calls)  # else one of those that ended has failed
    return ended


async def _outcome(call: ReplyCall) -> PolicyReply:
    """Return what was drawn. Raises: SpmdError, also where the session has ended meanwhile."""
    await asyncio.wait([call.task])
    if call.task.cancelled():
        raise Refused("", "the session has ended", status=401)
    return call.task.result()


async def _until_gone(receive: Any) -> None:
    """Wait until the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _retry(headers: Headers) -> tuple[bytes, bool]:
    """Return the client's name of a request, and whether it asks for an answer again."""
    found = dict(headers)
    named = found.get(b"idempotency-key", b"")
    count = found.get(b"x-stainless-retry-count", b"0")
    return named, bool(named) or count not in (b"", b"0")


def _headers(asked: ReplyRequest, versions: list[int]) -> Headers:
    """Return the headers that tell the weights, and the fields that were ignored."""
    span = "-".join(dict.fromkeys(map(str, versions)))
    return [(b"x-spmd-weights", span.encode()), *_ignored(asked)]


def _ignored(asked: ReplyRequest) -> Headers:
    """Return the header that names what was ignored, in letters that a header may have."""
    names = [_NO_NAME.sub("?", name)[:MAX_NAME] for name in asked.ignored[:MAX_IGNORED]]
    if len(asked.ignored) > MAX_IGNORED:
        names.append("...")
    return [(b"x-spmd-ignored", ", ".join(names).encode())] if names else []

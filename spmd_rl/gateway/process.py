"""Gateway of a process of episodes: the server, and the sessions that it serves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn

from spmd_rl.errors import ConfigError
from spmd_rl.gateway.app import make_app
from spmd_rl.gateway.branches import Branches
from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.gateway.dialects.asked import SamplingRules
from spmd_rl.gateway.limits import guarded_by
from spmd_rl.gateway.plan import SessionParts
from spmd_rl.gateway.replies import choose_format
from spmd_rl.gateway.session import Session
from spmd_rl.gateway.sessions import Sessions
from spmd_rl.hooks.child.episode_engine import EpisodeEngine
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.program import Site
from spmd_rl.types.prompts import Prompt

BACKLOG = 4096  # connections that wait to be accepted
CLOSE_S = 2  # for requests that still run when the gateway closes


class Gateway:
    """Serves the agents of all episodes of a process, at a port that the system chooses.

    An `EpisodeProgram` enters it in its `open`, outside of any episode, because what a call has
    started ends with the call. A process has one gateway.
    `branches` chooses what is learned of an episode.
    Raises: ConfigError for settings that cannot be, when it is entered.
    """

    def __init__(self, config: GatewayConfig, site: Site, branches: Branches | None = None) -> None:
        self._config, self._site = config, site
        self._branches = branches or Branches()
        self._sessions: Sessions
        self._server: _Server
        self._task: asyncio.Task[None]
        self.root_url = ""

    async def __aenter__(self) -> Gateway:
        config, texts = self._config, self._site.texts
        replies = choose_format(config.response_template, texts.chat_template)
        model = Path(self._site.model).name or "policy"
        parts = SessionParts(config, texts, replies, model, self._branches)
        self._sessions = Sessions(parts)
        listener = _listen(config.host)
        self._server = _Server(make_app(self._sessions), config)
        host, port = listener.getsockname()[:2]
        self.root_url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._server.serve([listener]))
        await self._server.ready.wait()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sessions.close()
        self._server.should_exit = True
        await self._task

    @property
    def num_sessions(self) -> int:
        """The number of sessions that are open."""
        return len(self._sessions)

    @property
    def shared_key(self) -> str:
        """The key with which a client finds a session by a name, in the header X-Session-ID."""
        return self._sessions.shared_key

    def name(self, session: Session, name: str) -> None:
        """Let a session be found by the shared key and a name, until it ends."""
        self._sessions.name(session, name)

    def open(
        self,
        ctx: HookContext,
        prompt: Prompt,
        engine: EpisodeEngine,
        rules: SamplingRules | None = None,
        max_turns: int = 0,
    ) -> Session:
        """Open a session for an episode, which closes it at its end.

        `rules` is the sampling of the engine. Without it that of the recipe's config holds; in an
        evaluation clients may then name none. After `max_turns` turns a call is refused; 0: never.
        Raises: SpmdError where too many sessions are open.
        """
        return self._sessions.open(self.root_url, ctx, prompt, engine, rules, max_turns)


class _Server(uvicorn.Server):
    """A server that leaves the signals of its process alone. `ready` is set once it listens."""

    def __init__(self, app: Any, config: GatewayConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=guarded_by(config),
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


def _listen(host: str) -> socket.socket:
    """Return a socket that listens at a free port. Raises: ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"agent.gateway.host = {host}: cannot listen there: {error}") from error
    listener.setblocking(False)
    return listener

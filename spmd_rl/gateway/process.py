"""Gateway of a process of episodes: the server, and the sessions that it serves."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from spmd_rl.gateway.app import make_app
from spmd_rl.gateway.branches import Branches
from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.gateway.dialects.asked import SamplingRules
from spmd_rl.gateway.http_server import HttpServer
from spmd_rl.gateway.plan import SessionParts
from spmd_rl.gateway.replies import choose_format
from spmd_rl.gateway.session import Session
from spmd_rl.gateway.sessions import Sessions
from spmd_rl.hooks.child.episode_engine import EpisodeEngine
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.program import Site
from spmd_rl.types.prompts import Prompt


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
        self._server: HttpServer
        self.root_url = ""

    async def __aenter__(self) -> Gateway:
        config, texts = self._config, self._site.texts
        replies = choose_format(config.response_template, texts.chat_template)
        model = Path(self._site.model).name or "policy"
        parts = SessionParts(config, texts, replies, model, self._branches)
        self._sessions = Sessions(parts)
        self._server = HttpServer(config)
        self.root_url = self._server.root_url
        await self._server.start(make_app(self._sessions))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sessions.close()
        await self._server.close()

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

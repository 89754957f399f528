"""Gateway of a process of episodes: the server, and the sessions that it serves."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from spmd_rl.gateway.app import App
from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.gateway.http_server import HttpServer
from spmd_rl.gateway.plan import SessionParts
from spmd_rl.gateway.replies import choose_format
from spmd_rl.gateway.sessions import Sessions
from spmd_rl.gateway.turns import Branches
from spmd_rl.hooks.program import Site


class Gateway(Sessions):
    """Serves the agents of all episodes of a process, at a port that the system chooses.

    An `EpisodeProgram` enters it in its `open`, outside of any episode, because what a call has
    started ends with the call. A process has one gateway.
    `branches` chooses what is learned of an episode.
    Raises: ConfigError for settings that cannot be.
    """

    def __init__(self, config: GatewayConfig, site: Site, branches: Branches | None = None) -> None:
        replies = choose_format(config.response_template, site.texts.chat_template)
        model = Path(site.model).name or "policy"
        super().__init__(SessionParts(config, site.texts, replies, model, branches or Branches()))
        self._server: HttpServer

    async def __aenter__(self) -> Gateway:
        self._server = HttpServer(self.parts.config)
        self.root_url = self._server.root_url
        await self._server.start(App(self))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close_all()
        await self._server.close()

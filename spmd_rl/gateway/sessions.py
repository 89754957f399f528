"""Sessions of a process, by their keys."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from spmd_rl.errors import SpmdError
from spmd_rl.gateway.dialects.asked import Refused, SamplingRules
from spmd_rl.gateway.keys import KeyTable, new_key
from spmd_rl.gateway.plan import SessionParts
from spmd_rl.gateway.session import Session
from spmd_rl.gateway.turn_source import EpisodeTurnSource
from spmd_rl.hooks.child.episode_engine import EpisodeEngine
from spmd_rl.hooks.context import HookContext
from spmd_rl.types.prompts import Prompt


class Sessions:
    """The sessions that are open, each found by its key alone.

    A session may have names besides, such as the id that a client gives each conversation. It is
    then found by `shared_key`, which is that of the process, and one of its names.
    """

    def __init__(self, parts: SessionParts) -> None:
        self.parts = parts
        self.shared_key = new_key()
        self._table: KeyTable[Session] = KeyTable()
        self._names: KeyTable[Session] = KeyTable()

    def __len__(self) -> int:
        return len(self._table)

    def open(
        self,
        root_url: str,
        ctx: HookContext,
        prompt: Prompt,
        engine: EpisodeEngine,
        rules: SamplingRules | None = None,
        max_turns: int = 0,
    ) -> Session:
        """Return a new session, which draws `max_turns` turns; 0: no limit.

        Raises: SpmdError where there are too many.
        """
        most = self.parts.config.max_sessions
        if len(self) >= most:
            raise SpmdError(f"{most} sessions are open already: see agent.gateway.max_sessions")
        if rules is None:
            rules = SamplingRules() if ctx.evaluation else sampling_rules(ctx.config)
        given = ctx, prompt, EpisodeTurnSource(engine), rules, max_turns
        session = Session(self.parts, new_key(), root_url, *given, self.forget)
        self._table.add(session.key, session)
        return session

    def name(self, session: Session, name: str) -> None:
        """Let a session be found by the shared key and a name, until it ends."""
        self._names.add(name, session)
        session.names.append(name)

    def forget(self, session: Session) -> None:
        """Make the key of a session a wrong one, and its names with it."""
        self._table.remove(session.key)
        for name in session.names:
            self._names.remove(name)

    def find(self, key: str, name: str = "") -> Session:
        """Return the session of a key, or of the shared key and a name.

        Raises: Refused for a wrong one.
        """
        is_shared = secrets.compare_digest(key.encode("utf-8", "replace"), self.shared_key.encode())
        session = self._names.find(name) if is_shared else self._table.find(key)
        if session is None:
            problem = "this key is wrong, or its episode has ended" if key else "there is no key"
            raise Refused("", problem, status=401, code="invalid_api_key")
        return session

    def close(self) -> None:
        """Close all sessions."""
        for session in self._table.values():
            session.close()


def sampling_rules(config: Mapping[str, Any]) -> SamplingRules:
    """Return the sampling of a recipe's config, as far as it says."""
    sampling = config.get("sampling")
    if not isinstance(sampling, Mapping):
        return SamplingRules()
    names = ("temperature", "top_p", "top_k", "min_p")
    found = {name: sampling[name] for name in names if name in sampling}
    return SamplingRules(**found, stop_ids=tuple(sampling.get("stop_ids") or ()))

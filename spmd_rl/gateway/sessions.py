"""Sessions of a process, by their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd_rl.errors import SpmdError
from spmd_rl.gateway.dialects.asked import Refused, SamplingRules
from spmd_rl.gateway.keys import KeyTable, new_key
from spmd_rl.gateway.plan import SessionParts
from spmd_rl.gateway.session import Session
from spmd_rl.hooks.child.episode_engine import EpisodeEngine
from spmd_rl.hooks.context import HookContext
from spmd_rl.types.prompts import Prompt


class Sessions:
    """The sessions that are open, each found by its key alone."""

    def __init__(self, parts: SessionParts) -> None:
        self.parts = parts
        self._table: KeyTable[Session] = KeyTable()

    def __len__(self) -> int:
        return len(self._table)

    def open(
        self,
        root_url: str,
        ctx: HookContext,
        prompt: Prompt,
        engine: EpisodeEngine,
        rules: SamplingRules | None = None,
    ) -> Session:
        """Return a new session. Raises: SpmdError where there are too many."""
        most = self.parts.config.max_sessions
        if len(self) >= most:
            raise SpmdError(f"{most} sessions are open already: see agent.gateway.max_sessions")
        if rules is None:
            rules = SamplingRules() if ctx.evaluation else sampling_rules(ctx.config)
        session = Session(self.parts, new_key(), root_url, ctx, prompt, engine, rules, self.forget)
        self._table.add(session.key, session)
        return session

    def forget(self, key: str) -> None:
        """Make a key a wrong one."""
        self._table.remove(key)

    def find(self, key: str) -> Session:
        """Return the session of a key. Raises: Refused for a wrong one."""
        session = self._table.find(key)
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

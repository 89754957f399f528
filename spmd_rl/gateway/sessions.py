"""Sessions of a process, each found by a key that is made at random.

A key is looked up by its digest, so how long that takes tells nothing of the keys that are known.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

from spmd_rl.errors import SpmdError
from spmd_rl.gateway.dialects.request import Refused, SamplingRules
from spmd_rl.gateway.plan import SessionParts
from spmd_rl.gateway.session import Session
from spmd_rl.gateway.turn_source import EpisodeTurnSource
from spmd_rl.hooks.child.episode_engine import EpisodeEngine
from spmd_rl.hooks.context import HookContext
from spmd_rl.types.prompts import Prompt

KEY_BYTES = 32


class Sessions:
    """The sessions that are open at `root_url`, each found by its key alone.

    A session may have names besides, such as the id that a client gives each conversation. It is
    then found by `shared_key`, which is that of the process, and one of its names.
    """

    def __init__(self, parts: SessionParts, root_url: str = "") -> None:
        self.parts, self.root_url = parts, root_url
        self.shared_key = _new_key()
        self._by_key: dict[bytes, Session] = {}  # by digests of keys, and of names
        self._by_name: dict[bytes, Session] = {}

    @property
    def num_sessions(self) -> int:
        """The number of sessions that are open."""
        return len(self._by_key)

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
        most = self.parts.config.max_sessions
        if self.num_sessions >= most:
            raise SpmdError(f"{most} sessions are open already: see agent.gateway.max_sessions")
        if rules is None:
            rules = SamplingRules() if ctx.evaluation else sampling_rules(ctx.config)
        given = ctx, prompt, EpisodeTurnSource(engine), rules, max_turns
        session = Session(self.parts, _new_key(), self.root_url, *given, self._forget)
        self._by_key[_digest(session.key)] = session
        return session

    def name(self, session: Session, name: str) -> None:
        """Let a session be found by the shared key and a name, until it ends."""
        self._by_name[_digest(name)] = session
        session.names.append(name)

    def find(self, key: str, name: str = "") -> Session:
        """Return the session of a key, or of the shared key and a name.

        Raises: Refused for a wrong one.
        """
        is_shared = secrets.compare_digest(key.encode("utf-8", "replace"), self.shared_key.encode())
        table, label = (self._by_name, name) if is_shared else (self._by_key, key)
        session = table.get(_digest(label))
        if session is None:
            problem = "this key is wrong, or its episode has ended" if key else "there is no key"
            raise Refused("", problem, status=401, code="invalid_api_key")
        return session

    def close_all(self) -> None:
        """Close all sessions."""
        for session in list(self._by_key.values()):
            session.close()

    def _forget(self, session: Session) -> None:
        """Make the key of a session a wrong one, and its names with it."""
        self._by_key.pop(_digest(session.key), None)
        for name in session.names:
            self._by_name.pop(_digest(name), None)


def key_of(path_key: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the key of a request, or "".

    A key in the path goes before one in the headers, as clients always send some key.
    """
    if path_key:
        return path_key
    bearer = named = ""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            bearer = value[7:].decode("latin-1").strip()
        elif name == b"x-api-key":
            named = value.decode("latin-1").strip()
    return named or bearer


def _new_key() -> str:
    """Return a key of 256 random bits, which may stand in a URL."""
    return "sk-" + secrets.token_urlsafe(KEY_BYTES)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "replace")).digest()


def sampling_rules(config: Mapping[str, Any]) -> SamplingRules:
    """Return the sampling of a recipe's config, as far as it says."""
    sampling = config.get("sampling")
    if not isinstance(sampling, Mapping):
        return SamplingRules()
    names = ("temperature", "top_p", "top_k", "min_p")
    found = {name: sampling[name] for name in names if name in sampling}
    return SamplingRules(**found, stop_ids=tuple(sampling.get("stop_ids") or ()))

"""Environments of OpenEnv servers: texts of the policy become actions, observations messages."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmd_rl.config.load import from_data
from spmd_rl.config.rules import require
from spmd_rl.environments.environment import (
    END_OF_SEEDS,
    AgentReply,
    Message,
    Observation,
    TextEnvironment,
    state_after,
)
from spmd_rl.environments.openenv_session import (
    INVALID,
    PACKAGE,
    OpenEnvError,
    OpenEnvServer,
    Shown,
    addresses_of,
)
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.failures import EpisodeFailure, blaming
from spmd_rl.hooks.load import load_function
from spmd_rl.types.prompts import Prompt

RESET = "reset"  # key of a record: what its `reset` gets
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class OpenEnvArgs:
    """`agent.args` of an OpenEnv server."""

    # field of an action that is the policy's text, or a function of the text; "": by the schema
    act: str = ""
    # field of an observation that is shown, or a function of the observation; "": all of it
    observe: str = ""
    # fields of the server's state that name the state of the world; none: all that was said
    state: list[str] = field(default_factory=list)
    reset: dict[str, Any] = field(default_factory=dict)  # what `reset` gets; a record may add to it
    call_s: float = 60.0  # the longest that a call of the server may take
    place_s: float = 600.0  # how long an episode waits for a place of the server

    def __post_init__(self) -> None:
        require(self.call_s > 0, "call_s", self.call_s, "more than 0")
        require(self.place_s >= 0, "place_s", self.place_s, "0 or more")


class OpenEnv(TextEnvironment):
    """One environment of an OpenEnv server, in a session of its own.

    The policy sees the prompt's messages, with the observation of `reset` after the last one. Then
    each reply is an action, and each observation a message of the user. A reply that is no action
    is no failure: the policy is told so, and goes on.
    """

    def __init__(self, server: OpenEnvServer, rules: OpenEnvRules) -> None:
        self._rules, self._server = rules, server
        self._session = server.session()
        self._past = b""  # a digest of what was seen and said

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        self._schema = {} if self._rules.acts else await self._server.action_schema()
        seed = int(rng.integers(END_OF_SEEDS))
        own = prompt.meta.get(RESET, {})
        if not isinstance(own, Mapping):
            raise EpisodeFailure("environment", f"the record's {RESET!r} is no table: {own!r}")
        params = {"seed": seed, **self._rules.args.reset, **own}
        shown = await self._session.reset(params)
        if shown.done:
            raise EpisodeFailure("environment", "the episode was over when it began")
        messages = _begun(prompt.chat["messages"], self._rules.observed(shown.observation))
        return Observation(messages, state=await self._state(messages))

    async def step(self, reply: AgentReply) -> Observation:
        self._note(reply.text)
        try:
            action, is_of_policy = self._rules.action(reply.text, self._schema)
        except NoAction as problem:
            return await self._told(str(problem))
        try:
            shown = await self._session.step(action)
        except OpenEnvError as error:
            if error.code == INVALID and is_of_policy:
                return await self._told(str(error))
            raise EpisodeFailure("environment", str(error)) from error
        return await self._seen(shown)

    async def close(self) -> None:
        await self._session.close()

    async def _told(self, problem: str) -> Observation:
        """Return what the policy sees after a reply that is no action."""
        message = {"role": "user", "content": f"This is no action: {problem}"}
        return Observation((message,), state=await self._state((message,)))

    async def _seen(self, shown: Shown) -> Observation:
        said = self._rules.observed(shown.observation)
        messages = ({"role": "user", "content": said},) if isinstance(said, str) else said
        if shown.done:
            return Observation(messages, done=True, reward=shown.reward)
        return Observation(messages, reward=shown.reward, state=await self._state(messages))

    async def _state(self, messages: tuple[Message, ...]) -> bytes:
        """Return a digest of the state of the world."""
        self._note(json.dumps(messages, sort_keys=True))
        names = self._rules.args.state
        if not names:
            return self._past
        try:
            state = await self._session.state()
        except OpenEnvError as error:
            raise EpisodeFailure("environment", str(error)) from error
        missing = [name for name in names if name not in state]
        if missing:
            has = ", ".join(sorted(state))
            problem = f"the server's state has no {missing[0]!r}: it has {has}"
            raise EpisodeFailure("environment", problem)
        text = json.dumps([state[name] for name in names], sort_keys=True)
        return state_after(b"", text)

    def _note(self, text: str) -> None:
        self._past = state_after(self._past, text)


class NoAction(Exception):
    """A reply of the policy is no action, and it is told why."""


class OpenEnvRules:
    """Makes actions of texts, and texts of observations, as the settings say."""

    def __init__(self, args: OpenEnvArgs) -> None:
        self.args = args
        self._act = _function("agent.args.act", args.act)
        self._observe = _function("agent.args.observe", args.observe)

    @property
    def acts(self) -> bool:
        """Whether actions are made without the server's schema."""
        return bool(self.args.act)

    def action(self, text: str, schema: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the action of a text, and whether its fields are the policy's own choice.

        Without a setting, the text is the action's only field where this is a text, and is JSON
        otherwise.
        Raises: NoAction for a text that is none; EpisodeFailure where a user's function is wrong.
        """
        if self._act is not None:
            return _of_function(self._act, text), False
        name = self.args.act or only_text_field(schema)
        return ({name: text}, False) if name else (_json_action(text), True)

    def observed(self, observation: dict[str, Any]) -> str | tuple[Message, ...]:
        """Return an observation as a text, or as messages where a user's function makes some.

        Without a setting, it is the only value where this is a text, and JSON otherwise.
        """
        if self._observe is not None:
            with blaming("environment", "agent.args.observe"):
                said = self._observe(observation)
            return _messages(said)
        name = self.args.observe
        if name and name not in observation:
            has = ", ".join(sorted(observation))
            raise EpisodeFailure("environment", f"the observation has no {name!r}: it has {has}")
        values = [one for one in observation.values() if one is not None]
        value = observation[name] if name else observation
        if not name and len(values) == 1 and isinstance(values[0], str):
            value = values[0]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def openenv_parts(name: str, args: Mapping[str, Any]) -> tuple[OpenEnvServer, OpenEnvRules]:
    """Return the server and the rules of the settings. Raises: ConfigError."""
    if importlib.util.find_spec("websockets") is None:
        raise ConfigError(
            "agent.kind = 'openenv' needs the package websockets: pip install -e '.[openenv]' in "
            f"the repository of spmd_rl, or pip install '{PACKAGE}'"
        )
    try:
        own = from_data(OpenEnvArgs, args)
    except ConfigError as error:
        raise ConfigError(f"agent.args of an OpenEnv server: {error}") from error
    addresses_of(name)
    return OpenEnvServer(name, own.call_s, own.place_s), OpenEnvRules(own)


def only_text_field(schema: Mapping[str, Any]) -> str:
    """Return the only field of an action by its JSON schema, where it is a text; else ""."""
    fields = [name for name in schema.get("properties", {}) if name != "metadata"]
    is_text = len(fields) == 1 and schema["properties"][fields[0]].get("type") == "string"
    return fields[0] if is_text else ""


def _begun(messages: Any, said: str | tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the first messages: the prompt's, and then what was observed.

    A text is added to the last message where this is the user's, as many templates refuse two
    messages of one role.
    """
    seen = [dict(one) for one in messages]
    if not isinstance(said, str):
        return said
    if not said:
        return tuple(seen)
    last = seen[-1]
    if last["role"] != "user" or not isinstance(last["content"], str):
        return (*seen, {"role": "user", "content": said})
    return (*seen[:-1], {**last, "content": f"{last['content']}\n\n{said}"})


def _json_action(text: str) -> dict[str, Any]:
    """Return the JSON object that a reply is, or that its last fenced block is."""
    blocks = _FENCED.findall(text)
    try:
        action = json.loads(blocks[-1] if blocks else text)
    except (ValueError, RecursionError) as error:
        raise NoAction(f"expected a JSON object: {error}") from error
    if not isinstance(action, dict):
        raise NoAction(f"expected a JSON object, not {type(action).__name__}")
    return action


def _function(setting: str, name: str) -> Callable[..., Any] | None:
    return load_function(setting, name) if ":" in name else None


def _of_function(act: Callable[..., Any], text: str) -> dict[str, Any]:
    """Return the action that a user's function makes. It raises ValueError for no action."""
    try:
        action = act(text)
    except ValueError as error:
        raise NoAction(str(error)) from error
    if not isinstance(action, Mapping):
        raise EpisodeFailure("environment", f"agent.args.act returned no table: {action!r}"[:400])
    return dict(action)


def _messages(said: Any) -> str | tuple[Message, ...]:
    """Return what a user's function has made of an observation."""
    if isinstance(said, str):
        return said
    if isinstance(said, (list, tuple)) and all(isinstance(one, Mapping) for one in said):
        return tuple(said)
    problem = f"agent.args.observe returned neither a text nor messages: {said!r}"
    raise EpisodeFailure("environment", problem[:400])

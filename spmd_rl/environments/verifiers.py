"""verifiers: episodes of its tasksets, unmodified, whose model calls come to the gateway.

An episode runs in this process: `Env.run_slot` plays it, the agent's program calls verifiers'
interception server, and that passes each request on, as it came, to a session of the gateway. So
any dialect that a program speaks gives exact tokens. Source: verifiers 0.4.0, `verifiers.v1`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_rl.environments.client_agents import gateway_of, rewarded
from spmd_rl.environments.client_errors import after_error, zeroed
from spmd_rl.environments.config import AgentConfig
from spmd_rl.errors import ConfigError
from spmd_rl.gateway.session import Session
from spmd_rl.hooks.child.episode_engine import EpisodeEngine
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.failures import EpisodeFailure, FailureKind
from spmd_rl.hooks.program import Site
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import AGENT, Sample

if TYPE_CHECKING:
    from spmd_rl.gateway.process import Gateway

TASK = "task"  # key of a record: the number of its task in the taskset
IN_PROCESS = "spmd_rl_in_process"  # harness of verifiers_harness.py
KEY = "SPMD_RL_GATEWAY_KEY"  # variable of this process, in which verifiers looks for the key
NO_LIMIT = 1 << 20  # of the episodes that share an interception server
KINDS: dict[str, FailureKind] = {
    "SandboxError": "sandbox",
    "ToolsetError": "tool",
    "HarnessError": "agent",
    "ProviderError": "engine",
    "TimeoutError": "timeout",
}


class VerifiersProgram:
    """Plays tasks of one taskset. Tools and interception servers live as long as the process."""

    def __init__(self, cfg: AgentConfig) -> None:
        self._cfg = cfg
        self._stack = AsyncExitStack()

    async def open(self, site: Site) -> None:
        """Load the environment and start the gateway. Raises: ConfigError."""
        self._env = await asyncio.to_thread(load_environment, self._cfg)
        self._stack.push_async_callback(sys.modules[IN_PROCESS].InProcessHarness.close)
        self._tasks = _Tasks(iter(self._env.taskset))
        self._gateway = await self._stack.enter_async_context(gateway_of(self._cfg, site))
        await self._stack.enter_async_context(self._env.serving())
        self._model = _model_of(self._gateway)

    async def play(self, ctx: HookContext, prompt: Prompt, engine: EpisodeEngine) -> list[Sample]:
        """Play the task of a record. Raises: EpisodeFailure by the class of verifiers' error."""
        task = self._tasks.find(prompt.meta.get(TASK))
        sessions: dict[str, Session] = {}

        def begun(trace: Any) -> None:
            session = self._gateway.open(ctx, prompt, engine)
            sessions[trace.id] = session
            self._gateway.name(session, trace.id)

        try:
            (slot,) = self._env.slots(task)
            episode = await self._env.run_slot(slot, self._model, on_trace=begun)
            try:
                refuse_errors(episode)
            except EpisodeFailure as failure:
                drawn = [one for session in sessions.values() for one in session.samples()]
                names = [error.type for error in errors_of(episode)]
                after_error(drawn, failure, names, self._cfg.on_error)
                samples = samples_of_traces(episode.traces, sessions)
                return zeroed(samples, str(failure), is_over=False)
            return samples_of_traces(episode.traces, sessions)
        finally:
            for session in sessions.values():
                session.close()

    async def close(self) -> None:
        await self._stack.aclose()


class _Tasks:
    """Tasks of a taskset by their number; an endless one is read as far as it is needed."""

    def __init__(self, tasks: Iterator[Any]) -> None:
        self._tasks, self._read = tasks, list[Any]()

    def find(self, number: Any) -> Any:
        """Raises: EpisodeFailure for what is no number of a task."""
        if not isinstance(number, int) or number < 0:
            raise EpisodeFailure("environment", f"the record's {TASK!r} is {number!r}, no number")
        missing = number + 1 - len(self._read)
        self._read += itertools.islice(self._tasks, max(missing, 0))
        if number >= len(self._read):
            raise EpisodeFailure("environment", f"the taskset has {len(self._read)} tasks only")
        return self._read[number]


def check_verifiers() -> None:
    """Raise a ConfigError without the package."""
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError(
            "agent.kind = 'verifiers' needs the package verifiers: pip install verifiers==0.4.0 "
            "--constraint constraints.txt"
        )


def load_environment(cfg: AgentConfig) -> Any:
    """Return verifiers' environment of these settings.

    `agent.name` is the id of its taskset, and `agent.args` are more of its environment's settings.
    Roles run on this host, by the harness in this process, unless the settings say otherwise.
    Raises: ConfigError for settings that verifiers refuses, or without the package.
    """
    check_verifiers()
    from verifiers.v1.utils import loaders

    from spmd_rl.environments import verifiers_harness

    sys.modules.setdefault(IN_PROCESS, verifiers_harness)
    taskset = {"id": cfg.name, **cfg.args.get("taskset", {})}
    raw = {**cfg.args, "taskset": taskset}
    try:
        settings = loaders.env_config_type(cfg.name, cfg.args.get("id", ""))
        for role in _roles_of(settings):
            own = dict(raw.get(role, {}))
            own.setdefault("runtime", {"type": "subprocess"})
            own.setdefault("harness", {"id": IN_PROCESS})
            own.setdefault("max_turns", cfg.max_turns)
            raw[role] = own
        raw["interception"] = _one_server(raw.get("interception", {}))
        return loaders.load_environment(settings.model_validate(raw))
    # a taskset is a module of somebody, and its settings are pydantic's
    except Exception as error:
        raise ConfigError(f"agent.name = {cfg.name!r}: {type(error).__name__}: {error}") from error


def write_prompts(path: str | Path, name: str, args: Mapping[str, Any], num: int) -> None:
    """Write the first tasks of a taskset as records that a run with these settings plays.

    Raises: ConfigError, as `load_environment` does.
    """
    env = load_environment(AgentConfig(kind="verifiers", name=name, args=dict(args)))
    lines = []
    for number, task in enumerate(itertools.islice(iter(env.taskset), num)):
        prompt = task.data.prompt
        text = prompt if isinstance(prompt, str) else f"task {number}"
        lines.append(json.dumps({"prompt": text or f"task {number}", TASK: number}) + "\n")
    Path(path).write_text("".join(lines), encoding="utf-8")


def samples_of_traces(traces: Sequence[Any], sessions: Mapping[str, Session]) -> list[Sample]:
    """Return the samples of an episode's agents, each with the reward of its trace.

    Agents that verifiers does not train, such as a simulated user, are left out. Where agents have
    several names, `metadata["agent"]` is that of each sample.
    Raises: EpisodeFailure where nobody has drawn anything.
    """
    samples = []
    are_named = len({trace.agent.name for trace in traces}) > 1
    for trace in traces:
        if not trace.agent.trainable:
            continue
        named = {AGENT: trace.agent.name} if are_named else {}
        drawn = sessions[trace.id].samples()
        for one in rewarded(drawn, reward_of(trace)) if drawn else ():
            samples.append(one.replace(metadata=one.metadata | named))
    return rewarded(samples, None)


def errors_of(episode: Any) -> list[Any]:
    """Return the errors of an episode and of its traces."""
    return [*episode.errors, *(one for trace in episode.traces for one in trace.errors)]


def refuse_errors(episode: Any) -> None:
    """Raise an EpisodeFailure for an episode that verifiers could not play to its end."""
    if errors := errors_of(episode):
        first = errors[0]
        kind = KINDS.get(first.type, "environment")
        raise EpisodeFailure(kind, f"{first.type}: {first.message}"[:1000])


def reward_of(trace: Any) -> dict[str, float]:
    """Return the reward of a trace and its parts."""
    parts = {name: one.value for name, one in trace.rewards.items() if one is not None}
    parts |= {name: value for name, value in trace.metrics.items() if value is not None}
    return {**parts, "reward": float(trace.reward)}


def _one_server(interception: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by which all episodes share the server that is there from the beginning.

    One that the pool starts for an episode would end with that episode, and leave others waiting.
    """
    if interception.get("type", "elastic") != "elastic":
        return dict(interception)
    return {**interception, "type": "elastic", "multiplex": NO_LIMIT}


def _roles_of(settings: Any) -> list[str]:
    """Return the names of an environment's agents."""
    from verifiers.v1.configs.agent import AgentConfig as Role

    fields = settings.model_fields.items()
    return [name for name, field in fields if isinstance(field.default, Role)]


def _model_of(gateway: Gateway) -> Any:
    """Return the gateway as verifiers' model. Each request names its trace, and so the session.

    One client serves all episodes, as verifiers keeps a client for each address and key.
    """
    from verifiers.v1.clients import EvalClientConfig, ModelContext

    os.environ[KEY] = gateway.shared_key
    client = EvalClientConfig(base_url=f"{gateway.root_url}/v1", api_key_var=KEY)
    return ModelContext(model="policy", client=client)

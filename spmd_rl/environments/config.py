"""Settings of agents: which environment an episode is, and what bounds it."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from spmd_rl.config.combinations import (
    ANY,
    OFF,
    ON,
    Combination,
    compared,
    equal,
    other_than,
    refuse,
)
from spmd_rl.config.load import from_data
from spmd_rl.config.rules import at_least, require
from spmd_rl.config.run import RunConfig
from spmd_rl.data.render.prompt_format import PromptFormat
from spmd_rl.errors import ConfigError
from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.hooks.config import HookConfig

OnError = Literal["zero", "fail"]
PROGRAM = "spmd_rl.environments.program:AgentProgram"
WITHOUT_KIND = "agent.name and agent.args need agent.kind"
ANSWER = "spmd_rl.rewards.answers.match:exact"  # the reward of recipes that say none

REFUSED = (
    Combination({"agent.kind": OFF, "agent.name": ON}, WITHOUT_KIND),
    Combination({"agent.kind": OFF, "agent.args": ON}, WITHOUT_KIND),
    Combination(
        {"agent.kind": other_than("", "tools", "skyrl_gym"), "agent.name": OFF},
        "{0} needs {1.key}",
    ),
    Combination(
        {"agent.kind": equal("function"), "agent.args": ON},
        "{1.key} must be empty: a function reads task and its own files",
    ),
    Combination(
        {
            "agent.learn": other_than("all"),
            "agent.kind": other_than("function", "command", "verifiers"),
        },
        "{0.key} needs {1.key} = function, command or verifiers",
    ),
)
# in a recipe with agents
RECIPE_REFUSED = (
    Combination(
        {"agent.kind": ON, "hooks.generate": ON},
        "{0.key} and {1.key} both play the episodes: set one of them",
    ),
    Combination(
        {
            "agent.kind": ON,
            "agent.deadline_s": compared("no less than", "run.deadline_s", operator.ge),
            "run.deadline_s": ANY,
        },
        "{1.key} = {1.value:g} fails an episode, and {2.key} = {2.value:g} ends the run that waits "
        "for it: raise {2.key} above it",
    ),
    Combination({"agent.kind": ON, "prompts.chat_template": OFF}, "{0} needs {1.key} = true"),
    Combination(
        {"agent.kind": ON, "reward": equal(ANSWER)},
        "{1} compares what the policy says last with the answer. With agent.kind, say so by its "
        "short name 'exact', or take the rewards of the environment with reward = 'environment'",
    ),
)


@dataclass(frozen=True)
class AgentConfig:
    """What plays the episodes of a run (docs/agents.md). Without a kind, nothing does."""

    # environment: a class of yours; tools: Python and a shell; skyrl_gym, textarena: an environment
    # of that package; verifiers: tasks of a taskset; openenv: a server of environments; function,
    # command: a program that calls the policy over HTTP
    kind: Literal[
        "",
        "environment",
        "tools",
        "skyrl_gym",
        "textarena",
        "verifiers",
        "openenv",
        "function",
        "command",
    ] = ""
    # package.module:name or path/to/file.py:name of a class or function; the environment's name in
    # its package; the id of a taskset; the address of a server; a command line
    name: str = ""
    # of the environment; of verifiers, more settings of its environment; of a command, more
    # variables of its environment
    args: dict[str, Any] = field(default_factory=dict)
    # of an episode, of all its agents together; a program's call beyond is refused
    max_turns: int = 16
    # that the policy draws in an episode in an environment, over all turns; 0: no limit
    max_tokens_total: int = 0
    # seconds of one episode, without the time that it waits for the engine; 0: none
    deadline_s: float = 300.0
    # share of the episodes of a step, or of an evaluation's set, that may fail before the run ends
    max_failed: float = 0.5
    # what an error of a program leads to that the policy has caused, by a reply that was cut, a
    # full context, a wrong call or too many turns: a reward of 0, or a failure as other errors do
    on_error: OnError = "zero"
    # branches of a program's conversations that are learned: all; main, which is what led to the
    # last reply; or a function learn(sample)
    learn: str = "all"
    # where verifiers, functions and commands call the policy
    gateway: GatewayConfig = field(default_factory=GatewayConfig)

    def __post_init__(self) -> None:
        at_least(self, {"max_turns": 1, "max_tokens_total": 0})
        value = self.deadline_s
        require(0 <= value < math.inf, "deadline_s", value, "0 (none) or more, and finite")
        require(0 <= self.max_failed <= 1, "max_failed", self.max_failed, "0 to 1")
        if self.learn not in ("all", "main") and ":" not in self.learn:
            problem = "expected all, main or path/to/file.py:function"
            raise ConfigError(f"agent.learn = {self.learn!r}: {problem}")
        refuse(REFUSED, {"agent": self})

    @property
    def calls_over_http(self) -> bool:
        """Whether a program of its own calls the policy."""
        return self.kind in ("function", "command")


class AgentRecipe(Protocol):
    """What an agent's settings have to agree with in a recipe's config."""

    @property
    def agent(self) -> AgentConfig: ...
    @property
    def hooks(self) -> HookConfig: ...
    @property
    def reward(self) -> str | dict[str, float]: ...
    @property
    def prompts(self) -> PromptFormat: ...
    @property
    def run(self) -> RunConfig: ...


def agree_with_agent(cfg: AgentRecipe) -> None:
    """Raise a ConfigError for settings that do not go with `agent.kind`, for `__post_init__`."""
    if not cfg.agent.kind:
        return
    hooks_with_agent(cfg.hooks, cfg.agent)
    refuse(RECIPE_REFUSED, cfg)


def hooks_with_agent(hooks: HookConfig, agent: AgentConfig) -> HookConfig:
    """Return the hooks of a run whose episodes `agent` plays; as they are without a kind.

    Raises: ConfigError where the hooks name another player.
    """
    if not agent.kind:
        return hooks
    refuse(RECIPE_REFUSED[:1], {"agent": agent, "hooks": hooks})
    return replace(hooks, generate=PROGRAM, episode_deadline_s=agent.deadline_s)


def agent_of(config: Mapping[str, Any]) -> AgentConfig:
    """Return the agent's settings in a recipe's config as plain data."""
    return from_data(AgentConfig, config.get("agent", {}))

"""Making of agents: from their settings to what plays an episode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from spmd_rl.environments.client_agents import check_gateway, load_learn
from spmd_rl.environments.client_program import CommandAgent, check_command
from spmd_rl.environments.config import AgentConfig
from spmd_rl.environments.environment import Environment
from spmd_rl.environments.function import FunctionAgent, load_agent_function
from spmd_rl.environments.openenv import OpenEnv, openenv_parts
from spmd_rl.environments.skyrl_gym import SkyRLGym, check_skyrl_gym
from spmd_rl.environments.textarena import TextArena, check_textarena
from spmd_rl.environments.tools.code_tools import CodeTools
from spmd_rl.environments.tools.sandbox_tools import TOOL_LIMITS
from spmd_rl.environments.verifiers import check_verifiers
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.load import load_function
from spmd_rl.rewards.code.sandbox import check_sandbox

METHODS = ("reset", "step", "score", "close")


def client_agent(cfg: AgentConfig, num_threads: int) -> FunctionAgent | CommandAgent:
    """Return the program that calls the policy over HTTP. Raises: ConfigError."""
    if cfg.kind == "function":
        return FunctionAgent(cfg.name, num_threads, cfg.on_error)
    variables = {name: str(value) for name, value in cfg.args.items()}
    return CommandAgent(cfg.name, variables, cfg.on_error)


def environment_maker(cfg: AgentConfig) -> Callable[[], Environment]:
    """Return what makes the environment of an episode, for settings that `check_agent` takes."""
    if cfg.kind == "skyrl_gym":
        return lambda: SkyRLGym(cfg.name, cfg.args, cfg.max_turns)
    if cfg.kind == "textarena":
        return lambda: TextArena(cfg.name, cfg.args)
    if cfg.kind == "openenv":
        server, rules = openenv_parts(cfg.name, cfg.args)
        return lambda: OpenEnv(server, rules)
    own = CodeTools if cfg.kind == "tools" else load_function("agent.name", cfg.name)
    return lambda: own(**cfg.args)


def check_agent(cfg: AgentConfig) -> None:
    """Import what a config names. Raises: ConfigError that says what is wrong with it."""
    load_learn(cfg.learn)
    if cfg.kind in ("function", "command", "verifiers"):
        check_gateway(cfg)
    if cfg.kind == "skyrl_gym":
        check_skyrl_gym(cfg.name)
    elif cfg.kind == "textarena":
        check_textarena(cfg.name, cfg.args)
    elif cfg.kind == "environment":
        own = load_function("agent.name", cfg.name)
        _check_class(cfg.name, own)
        _check_args(cfg.name, own, cfg.args)
    elif cfg.kind == "verifiers":
        check_verifiers()
    elif cfg.kind == "openenv":
        openenv_parts(cfg.name, cfg.args)
    elif cfg.kind == "function":
        load_agent_function(cfg.name)
    elif cfg.kind == "command":
        check_command(cfg.name, cfg.args)
    elif cfg.kind == "tools":
        check_sandbox(TOOL_LIMITS)
        _check_args(cfg.kind, CodeTools, cfg.args)


def _check_class(name: str, own: Callable[..., Any]) -> None:
    """Raise a ConfigError unless this is a class of environments."""
    if not inspect.isclass(own):
        raise ConfigError(f"agent.name {name!r}: it is a function, not a class of environments")
    for method in METHODS:
        if not inspect.iscoroutinefunction(getattr(own, method, None)):
            raise ConfigError(
                f"agent.name {name!r}: it has no `async def {method}`; TextEnvironment of "
                "spmd_rl.environments.environment has those that it can do without"
            )


def _check_args(name: str, own: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise a ConfigError unless the class takes these arguments."""
    try:
        inspect.signature(own).bind(**args)
    except TypeError as error:
        raise ConfigError(f"agent.args do not fit {name!r}: {error}") from error

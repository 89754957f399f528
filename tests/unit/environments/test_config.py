"""Settings of agents: what does not go together is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spmd_rl.config.run import RunConfig
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.environments.config import PROGRAM, AgentConfig, hooks_with_agent
from spmd_rl.environments.failures import refuse_failures
from spmd_rl.environments.make import check_agent, environment_maker
from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.recipes import collect, evaluate, grpo, grpo_async, grpo_fully_async, rlhf
from spmd_rl.recipes.rollout_settings import rollout_settings
from spmd_rl.types.groups import Group
from spmd_rl.types.samples import Sample
from tests.unit.environments.cases import chat_prompt
from tests.unit.hooks.cases import make_sample

HERE = Path(__file__)
OWN = "examples/environments/higher_lower.py:HigherLower"
AGENT = AgentConfig(kind="environment", name=OWN)
RECIPES = (grpo, grpo_async, grpo_fully_async, collect, evaluate)


def made(recipe: Any, **values: Any) -> Any:
    """Return a recipe's config with an agent."""
    given = {
        "model": "examples/environments/model",
        "data": "examples/environments/train.jsonl",
        "reward": "environment",
        "prompts": PromptConfig(chat_template=True),
        "agent": AGENT,
    }
    return recipe.Config(**given | values)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_a_recipe_with_an_agent_has_its_program(recipe: Any) -> None:
    settings = rollout_settings(made(recipe))
    assert settings["hooks"].generate == PROGRAM
    assert settings["hooks"].episode_deadline_s == AGENT.deadline_s
    assert settings["settings"]["agent"]["name"] == OWN
    without = rollout_settings(made(recipe, agent=AgentConfig()))
    assert without["hooks"].generate == ""


def test_rlhf_may_have_an_agent() -> None:
    chat = PromptConfig(chat_template=True, answer_key="")
    cfg = made(rlhf, reward="", reward_model="x", prompts=chat)
    assert rollout_settings(cfg)["hooks"].generate == PROGRAM


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"hooks": HookConfig(generate="a.py:f")}, "set one of them"),
        ({"prompts": PromptConfig()}, "prompts.chat_template = true"),
        ({"reward": "spmd_rl.rewards.answers.match:exact"}, "reward = 'environment'"),
        ({"run": RunConfig(deadline_s=300)}, "raise run.deadline_s above it"),
    ],
)
def test_what_does_not_go_together_is_refused(
    recipe: Any, values: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        made(recipe, **values)


def test_a_recipe_that_knows_no_agent_refuses_both() -> None:
    with pytest.raises(ConfigError, match="set one of them"):
        hooks_with_agent(HookConfig(generate="a.py:f"), AGENT)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"kind": "environment"}, "needs agent.name"),
        ({"name": OWN}, "need agent.kind"),
        ({"args": {"a": 1}}, "need agent.kind"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_failed": 1.5}, "max_failed"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"kind": "function", "name": "a.py:f", "learn": "some"}, "expected all, main"),
        ({"kind": "tools", "learn": "main"}, "agent.learn needs"),
    ],
)
def test_settings_without_sense_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        AgentConfig(**values)


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        (OWN, {"no_such": 1}, "agent.args do not fit"),
        (f"{HERE}:made", {}, "a function, not a class"),
        (f"{HERE}:NoEnvironment", {}, "no `async def reset`"),
        ("examples/environments/higher_lower.py:Missing", {}, "has no 'Missing'"),
    ],
)
def test_a_class_that_cannot_be_used_is_named(
    name: str, args: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_agent(AgentConfig(kind="environment", name=name, args=args))


class NoEnvironment:
    """It has none of the methods."""


def test_each_episode_has_an_environment_of_its_own() -> None:
    make = environment_maker(AgentConfig(kind="environment", name=OWN, args={"num_guesses": 2}))
    one, other = make(), make()
    assert one is not other
    assert vars(one) == {"left": 2}


def sample(index: int, **values: Any) -> Sample:
    return make_sample(index=index).replace(**values)


def failed_and_fine(num_failed: int, num_fine: int, per_episode: int = 1) -> list[Group]:
    samples = [
        sample(index, execution=index // per_episode if per_episode > 1 else -1)
        for index in range(num_fine * per_episode)
    ]
    failed: list[Sample] = [
        sample(100 + index, status="failed", metadata={"error": "the tool is gone"})
        for index in range(num_failed)
    ]
    return [Group(chat_prompt(), samples, failed)]


@pytest.mark.parametrize("per_episode", [1, 3])
def test_a_run_bears_a_share_of_failures(per_episode: int) -> None:
    refuse_failures(failed_and_fine(2, 2, per_episode), AGENT)
    refuse_failures(failed_and_fine(0, 0), AGENT)
    refuse_failures(failed_and_fine(3, 2, per_episode), AgentConfig())
    with pytest.raises(SpmdError, match="3 of 5 episodes.*the tool is gone"):
        refuse_failures(failed_and_fine(3, 2, per_episode), AGENT)

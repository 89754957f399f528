"""Environments of skyrl-gym, unmodified: what they show and reward is what a direct call gives."""

from __future__ import annotations

from typing import Any

import pytest

from spmd_rl.environments.config import AgentConfig
from spmd_rl.environments.make import check_agent, environment_maker
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.types.samples import TURN_RECORDS
from tests.unit.environments.cases import SpokenEngine, chat_prompt, episode

pytestmark = pytest.mark.agents

gym = pytest.importorskip("skyrl_gym")
NAME = "gsm8k_multi_turn"


def played(said: list[str], answer: str = "7", meta: dict[str, Any] | None = None) -> Any:
    make = environment_maker(AgentConfig(kind="skyrl_gym", name=NAME, max_turns=3))
    prompt = chat_prompt("3+4=", answer, meta=meta or {})
    (sample,) = episode(make(), SpokenEngine(said), prompt)
    return sample


@pytest.mark.parametrize(
    "said", [["#### 7"], ["#### 6", "#### 7"], ["no", "#### 8", "#### 9"], ["x", "y", "z"]]
)
def test_rewards_are_those_of_a_direct_call(said: list[str]) -> None:
    sample = played(said)
    direct = gym.make(
        NAME,
        extras={"reward_spec": {"ground_truth": "7"}, "max_turns": 3, "extra_info": {}},
    )
    outs = [direct.step(text) for text in said]
    assert outs[-1]["done"]
    assert [turn["reward"] for turn in sample.metadata[TURN_RECORDS]] == [
        out["reward"] for out in outs
    ]
    assert sample.reward == pytest.approx(sum(out["reward"] for out in outs))
    assert sample.parts["steps"] == len(said)
    shown = [one["content"] for one in sample.messages if one["role"] == "user"]
    assert shown == [one["content"] for out in outs for one in out["observations"]]


def test_a_record_has_its_own_ground_truth_and_limit() -> None:
    meta = {"reward_spec": {"ground_truth": "8"}, "extra_info": {}, "max_turns": 1}
    assert played(["#### 8"], meta=meta).reward == 1.0
    assert len(played(["#### 7"], meta=meta).metadata[TURN_RECORDS]) == 1


def test_a_record_may_name_the_environment() -> None:
    make = environment_maker(AgentConfig(kind="skyrl_gym"))
    prompt = chat_prompt("3+4=", "7", meta={"env_class": "gsm8k"})
    (sample,) = episode(make(), SpokenEngine(["#### 7"]), prompt)
    assert sample.reward == 1.0
    with pytest.raises(EpisodeFailure, match="env_class"):
        episode(make(), SpokenEngine(["#### 7"]), chat_prompt())


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="gsm8k_multi_turn"):
        check_agent(AgentConfig(kind="skyrl_gym", name="gsm9k"))

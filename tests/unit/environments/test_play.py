"""Play of an episode: rewards, records of turns, limits and failures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.environments.environment import AgentReply, EpisodeResult, Observation, TextEnvironment
from spmd_rl.environments.play import EpisodeLimits
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.rewards.answers.final_text import final_text
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import NO_VERSION, TURN_RECORDS
from tests.unit.data.chat_templates import CHATML, FORGETFUL, OPENED
from tests.unit.environments.cases import SpokenEngine, chat_prompt, episode


class Echo(TextEnvironment):
    """Repeats what the policy says, and rewards turn n with `rewards[n]`; ends after the last."""

    def __init__(self, rewards: list[Any], score: Any = 0.0) -> None:
        self.rewards, self.scored = [*rewards], score
        self.num_closed = 0
        self.played: EpisodeResult | None = None

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        return Observation(state=b"\x01")

    async def step(self, reply: AgentReply) -> Observation:
        reward = self.rewards.pop(0)
        if isinstance(reward, Exception):
            raise reward
        shown = {"role": "user", "content": f"echo {reply.text}"}
        return Observation((shown,), not self.rewards, reward, reply.text.encode())

    async def score(self, episode: EpisodeResult) -> float | dict[str, float]:
        self.played = episode
        result: float | dict[str, float] = self.scored
        return result

    async def close(self) -> None:
        self.num_closed += 1


words = st.text("abc ", min_size=1, max_size=6).filter(lambda text: text.strip())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(words, st.floats(-4, 4)), min_size=1, max_size=5), st.floats(-2, 2))
def test_a_sample_is_what_was_drawn_and_its_records_say_where(
    turns: list[tuple[str, float]], score: float
) -> None:
    said, rewards = [text for text, _ in turns], [reward for _, reward in turns]
    engine = SpokenEngine(said)
    (sample,) = episode(Echo(rewards, score), engine)
    assert sample.reward == pytest.approx(math.fsum(rewards) + score)
    records = sample.metadata[TURN_RECORDS]
    assert [record["reward"] for record in records] == rewards
    assert [bytes.fromhex(record["state"]) for record in records] == [
        b"\x01",
        *(text.encode() for text in said[:-1]),
    ]
    learned = np.zeros(len(sample.tokens), bool)
    for record, text in zip(records, said, strict=True):
        first, end = record["first_token"], record["first_token"] + record["num_tokens"]
        learned[first:end] = True
        assert engine.tokenizer.decode(sample.tokens[first:end]) == text + "<|end|>"
    assert np.array_equal(learned, sample.versions != NO_VERSION)
    for number, past in enumerate(engine.pasts[1:]):
        assert past.endswith(f"<|start|>user\necho {said[number]}<|end|>\n<|start|>assistant\n")


def test_score_has_parts_and_sees_all_messages() -> None:
    environment = Echo([0.5, 0.0], {"reward": 1.0, "right": 1.0})
    (sample,) = episode(environment, SpokenEngine(["a", "b"]))
    assert sample.reward == 1.5
    assert sample.parts == {"reward": 1.5, "right": 1.0}
    assert environment.played is not None
    assert environment.played.ending == "done"
    assert environment.played.rewards == {"": 0.5}
    contents = [one["content"] for one in environment.played.messages[""]]
    assert contents == ["begin", "a", "echo a", "b", "echo b"]
    assert [one["content"] for one in sample.messages] == ["a", "echo a", "b"]


@pytest.mark.parametrize(
    ("limits", "ending", "num_turns"),
    [
        (EpisodeLimits(2), "turns", 2),
        (EpisodeLimits(9, total_tokens=3), "tokens", 1),
        (EpisodeLimits(9), "context", 3),
    ],
)
def test_limits_end_an_episode(limits: EpisodeLimits, ending: str, num_turns: int) -> None:
    environment = Echo([0.25] * 9)
    (sample,) = episode(environment, SpokenEngine(["aaa", "bbb", "ccc", ""]), limits=limits)
    assert environment.played is not None
    assert (environment.played.ending, environment.played.num_turns) == (ending, num_turns)
    assert sample.reward == 0.25 * num_turns
    assert len(sample.metadata[TURN_RECORDS]) == num_turns


def test_the_last_turn_gets_what_is_left_of_the_tokens() -> None:
    limits = EpisodeLimits(9, total_tokens=7, turn_tokens=5)
    engine = SpokenEngine(["aaaa", "bbbb", "cccc"])
    (sample,) = episode(Echo([0.0] * 9), engine, limits=limits)
    drawn = [record["num_tokens"] for record in sample.metadata[TURN_RECORDS]]
    assert sum(drawn) == 7
    assert engine.limits == [None, 7 - drawn[0]]


@pytest.mark.parametrize(
    ("reward", "kind", "problem"),
    [
        (KeyError("gone"), "environment", "step raised KeyError: 'gone'"),
        (EpisodeFailure("tool", "no such tool"), "tool", "no such tool"),
        (math.nan, "environment", "the reward nan"),
        ({"": math.inf}, "environment", "the reward inf"),
    ],
)
def test_what_an_environment_raises_has_a_kind(reward: Any, kind: str, problem: str) -> None:
    environment = Echo([0.0, reward])
    with pytest.raises(EpisodeFailure, match=problem) as caught:
        episode(environment, SpokenEngine(["a", "b"]))
    assert caught.value.kind == kind
    assert environment.num_closed == 1


@pytest.mark.parametrize("score", [math.nan, "1", {"right": 1.0}, None])
def test_a_score_is_a_number_or_has_a_reward(score: Any) -> None:
    with pytest.raises(EpisodeFailure, match="score returned"):
        episode(Echo([0.0], score), SpokenEngine(["a"]))


def test_a_prompt_that_fills_the_context_has_failed() -> None:
    environment = Echo([1.0])
    with pytest.raises(EpisodeFailure) as caught:
        episode(environment, SpokenEngine([""]))
    assert caught.value.kind == "context"
    assert environment.num_closed == 1


class Listener(Echo):
    """Notes what it hears."""

    def __init__(self, num_turns: int) -> None:
        super().__init__([0.0] * num_turns)
        self.heard: list[tuple[str, str]] = []

    async def step(self, reply: AgentReply) -> Observation:
        self.heard.append((reply.thought, reply.text))
        return await super().step(reply)


@pytest.mark.parametrize(
    ("template", "said", "heard"),
    [
        (CHATML, ["<think>\nbet?\n</think>\n\n[check]"], [("bet?", "[check]")]),
        (CHATML, [" [check] "], [("", " [check] ")]),
        (CHATML, ["<think>bet [check]"], [("bet [check]", "")]),
        (CHATML, ["so <think>a</think> b <think>c"], [("so <think>a</think> b <think>c", "")]),
        (CHATML, ["<think>a</think>b", "c"], [("a", "b"), ("", "c")]),
        (FORGETFUL, ["<think>a</think>b", "<think>c</think>d"], [("a", "b"), ("c", "d")]),
        (OPENED, ["bet?\n</think>\n[check]", "no"], [("bet?", "[check]"), ("no", "")]),
        (OPENED, ["bet? [check]", "a</think>b"], [("bet? [check]", ""), ("a", "b")]),
    ],
)
def test_an_environment_hears_what_follows_a_thought_as_graders_do(
    template: str, said: list[str], heard: list[tuple[str, str]]
) -> None:
    environment, prompt = Listener(len(said)), chat_prompt(template=template)
    samples = episode(environment, SpokenEngine(said, template), prompt)
    assert environment.heard == heard
    assert final_text(prompt, samples[-1]).lstrip() == heard[-1][1].lstrip()
    assert environment.played is not None
    spoken = [one for one in environment.played.messages[""] if one["role"] == "assistant"]
    assert [(one.get("reasoning_content", ""), one["content"]) for one in spoken] == heard
    drawn = [one["content"] for one in samples[-1].messages if one["role"] == "assistant"]
    assert [text.removeprefix("<think>") for text in drawn] == [
        text.removeprefix("<think>") for text in said
    ], "what was drawn stays"


def test_a_reward_is_for_the_turn_before_it_though_the_template_rewrites_the_past() -> None:
    said = ["<think>a</think>b", "<think>c</think>d", "e"]
    samples = episode(Echo([1.0, 2.0, 4.0]), SpokenEngine(said, FORGETFUL))
    records = [sample.metadata[TURN_RECORDS] for sample in samples]
    assert len(samples) > 1, "the template drops earlier thoughts"
    assert [turn["reward"] for turns in records for turn in turns] == [1.0, 2.0, 4.0]


class Duel(TextEnvironment):
    """Two agents speak in turn; each sees what the other said. The second one wins."""

    def __init__(self, num_turns: int) -> None:
        self.left = num_turns

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        self.next = 0
        return self._shown("begin", {})

    async def step(self, reply: AgentReply) -> Observation:
        assert reply.agent == f"agent {self.next}"
        self.left -= 1
        self.next = 1 - self.next
        if not self.left:
            end = {"role": "user", "content": "the end"}
            rewards = {"agent 0": -1.0, "agent 1": 1.0}
            return Observation((end,), done=True, reward=rewards, agent="agent 1")
        return self._shown(reply.text, {f"agent {1 - self.next}": 0.5})

    def _shown(self, text: str, reward: Mapping[str, float]) -> Observation:
        first = {"role": "system", "content": f"you are {self.next}"}
        message = {"role": "user", "content": text}
        is_first = not hasattr(self, "_began") or self.next not in self._began
        self._began = {*getattr(self, "_began", set()), self.next}
        return Observation(
            (first, message) if is_first else (message,), reward=reward, agent=f"agent {self.next}"
        )


def test_each_agent_has_a_conversation_and_a_reward_of_its_own() -> None:
    engine = SpokenEngine(["a", "b", "c", "d"])
    one, other = episode(Duel(4), engine)
    assert (one.metadata["agent"], other.metadata["agent"]) == ("agent 0", "agent 1")
    assert (one.reward, other.reward) == (0.0, 1.5)
    assert [turn["reward"] for turn in one.metadata[TURN_RECORDS]] == [0.5, -0.5]
    assert [turn["reward"] for turn in other.metadata[TURN_RECORDS]] == [0.5, 1.0]
    for sample, mine, others in (
        (one, ["a", "c"], ["begin", "b"]),
        (other, ["b", "d"], ["a", "c"]),
    ):
        number = sample.metadata["agent"][-1]
        expected = f"<|start|>system\nyou are {number}<|end|>\n"
        assert sample.context is not None
        text = engine.tokenizer.decode([*sample.context, *sample.tokens])
        for said, shown in zip(mine, others, strict=True):
            expected += f"<|start|>user\n{shown}<|end|>\n<|start|>assistant\n{said}<|end|>\n"
        assert text + "\n" == expected


def test_the_last_observation_is_for_the_agent_that_it_names() -> None:
    class Watched(Duel):
        async def score(self, episode: EpisodeResult) -> float:
            self.played = episode
            return 0.0

    environment = Watched(4)
    episode(environment, SpokenEngine(["a", "b", "c", "d"]))
    last = {name: seen[-1]["content"] for name, seen in environment.played.messages.items()}
    assert last == {"agent 0": "c", "agent 1": "the end"}


def test_a_prompt_without_a_template_is_refused() -> None:
    with pytest.raises(ValueError, match="chat_template"):
        episode(Echo([1.0]), SpokenEngine(["a"]), chat_prompt().replace(chat={}))

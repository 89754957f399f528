"""Tasksets of verifiers 0.4.0, unmodified, played with the policy behind the gateway."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd_rl.environments.config import AgentConfig
from spmd_rl.errors import SpmdError
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.hooks.program import Site
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from tests.agents.test_training import check_bits, longer_model, write
from tests.dist.recipes.conftest import REPO, run_in
from tests.unit.gateway.fakes import FakeEngine, FakeTexts

pytestmark = pytest.mark.agents
TASKSET = "say_number"
CONFIG = {"hooks": {"concurrency": 8}, "sampling": {"temperature": 1.0, "max_tokens": 64}}


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers finds a taskset by the name of an installed module."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def played(
    replies: Any, *tasks: Any, name: str = TASKSET, is_exact: bool = True, **settings: Any
) -> list[Any]:
    """Return the samples of an episode for each task, or why it failed; all run at once."""
    pytest.importorskip("verifiers")
    pytest.importorskip("uvicorn")
    from spmd_rl.environments.verifiers import VerifiersProgram

    texts = FakeTexts()
    engines = [FakeEngine(texts, replies) for _ in tasks]
    program = VerifiersProgram(AgentConfig(kind="verifiers", name=name, **settings))

    async def episode(engine: Any, number: int, task: Any) -> list[Sample] | EpisodeFailure:
        prompt = Prompt(number, np.array([1, 2], np.int32), text="task", meta={"task": task})
        try:
            return await program.play(HookContext(config=CONFIG), prompt, engine)
        except EpisodeFailure as failure:
            return failure

    async def main() -> list[Any]:
        await program.open(Site(CONFIG, 0, "/models/tiny", texts))
        try:
            pairs = enumerate(zip(engines, tasks, strict=True))
            return await asyncio.gather(*(episode(one, n, task) for n, (one, task) in pairs))
        finally:
            await program.close()

    found = asyncio.run(main())
    for engine, samples in zip(engines, found, strict=True):
        if isinstance(samples, list) and is_exact:
            check_exact(engine, samples)
    return found


def check_exact(engine: FakeEngine, samples: list[Sample]) -> None:
    """Every drawn token is learned once, after the tokens that it was drawn after."""
    learned = []
    for sample in samples:
        whole = [*sample.context.tolist(), *sample.tokens.tolist()]
        starts = np.flatnonzero(np.diff(np.concatenate([[0], sample.mask.astype(int)])) == 1)
        for start in starts.tolist():
            at = len(sample.context) + start
            drawn = next(
                ids
                for past, ids in engine.drawn
                if past == whole[:at] and ids == whole[at : at + len(ids)]
            )
            learned.append(drawn)
    assert sorted(learned) == sorted(ids for _, ids in engine.drawn)


def test_a_task_gives_the_reward_and_the_tokens() -> None:
    def reply(prompt: str) -> str:
        assert "obey" in prompt
        return "3<|end|>"

    right, wrong = played(reply, 3, 1)
    ((sample,), (other,)) = right, wrong
    assert (sample.reward, other.reward) == (1.0, 0.0)
    assert sample.parts == {"right": 1.0, "letters": 1.0, "reward": 1.0}
    assert sample.messages[-1]["content"] == "3"


def test_an_engine_that_refuses_fails_the_sample() -> None:
    def reply(prompt: str) -> str:
        raise SpmdError("the context is full")

    (failure,) = played(reply, 3)
    assert isinstance(failure, EpisodeFailure)
    assert failure.kind in ("engine", "agent")
    assert "the context is full" in str(failure)


@pytest.mark.parametrize(
    ("task", "problem"), [(None, "no number"), ("3", "no number"), (99, "has 5 tasks only")]
)
def test_a_record_names_its_task(task: Any, problem: str) -> None:
    (failure,) = played(lambda _: "3<|end|>", task)
    assert failure.kind == "environment"
    assert problem in str(failure)


@pytest.mark.usefixtures("five_words")
def test_a_game_of_textarena_has_several_turns() -> None:
    pytest.importorskip("textarena")
    args = {"taskset": {"game": "Hangman-v0"}}

    asked: list[str] = []

    def reply(prompt: str) -> str:
        asked.append(prompt)
        return f"[{'ab'[len(asked) % 2]}]<|end|>"

    (samples,) = played(reply, 0, name="textarena", args=args)
    assert isinstance(samples, list), samples
    (sample,) = samples
    assert sum(turn["role"] == "assistant" for turn in sample.messages) == len(asked) >= 2
    assert 0 <= sample.reward <= 1


def test_a_user_that_is_simulated_is_no_agent_to_learn() -> None:
    """Both sides draw from the policy; verifiers says that the user's are not for training."""

    def reply(prompt: str) -> str:
        if "role-playing a USER" not in prompt:
            return "3<|end|>"
        return ("###DONE###" if "assistant\nsay it" in prompt else "say it") + "<|end|>"

    (samples,) = played(reply, 3, args={"id": "user-sim"}, is_exact=False)
    assert isinstance(samples, list), samples
    (sample,) = samples
    assert (sample.metadata["agent"], sample.reward) == ("assistant", 1.0)
    assert sample.messages[-1]["content"] == "3"


def test_attempts_at_a_task_have_rewards_of_their_own() -> None:
    said = iter("313")
    (samples,) = played(lambda _: f"{next(said)}<|end|>", 3, args={"id": "best-of-n", "n": 3})
    assert isinstance(samples, list), samples
    assert sorted(sample.reward for sample in samples) == [0.0, 1.0, 1.0]
    assert {(sample.reward, sample.parts["best"]) for sample in samples} == {(1.0, 1.0), (0.0, 0.0)}


def test_records_are_written_from_a_taskset(tmp_path: Path) -> None:
    pytest.importorskip("verifiers")
    from spmd_rl.environments.verifiers import write_prompts

    write_prompts(tmp_path / "train.jsonl", TASKSET, {}, num=3)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert rows == [{"prompt": f"say {number}", "task": number} for number in range(3)]


def test_a_run_of_a_taskset_has_equal_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of a model that knows nothing; the reward is that of the taskset.

    The episodes that run at once are more than verifiers lets share a server if nobody says so.
    """
    pytest.importorskip("verifiers")
    places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    data = write(tmp_path / "train.jsonl", ({"prompt": f"say {n}", "task": n} for n in range(5)))
    ended = run_in(
        tmp_path,
        "grpo",
        f"--config={REPO / 'examples/environments/grpo.toml'}",
        f"--model={longer_model(tmp_path, 256)}",
        f"--data={data}",
        "--prompts.answer_key=",
        "--agent.kind=verifiers",
        f"--agent.name={TASKSET}",
        "--trainer.init=random",
        "--prompts_per_step=4",
        "--sampling.num_samples=12",
        "--steps=2",
        small=False,
    )
    check_bits(ended, has_turns=False)
    assert all("reward/letters" in row for row in ended.metrics)

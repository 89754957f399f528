"""Examples of hooks on real ranks: a calculator in several turns, and a judge that takes long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.recipes.conftest import EXAMPLE, REPO, Ended

pytestmark = pytest.mark.dist

CALCULATOR = REPO / "examples/calculator"
CALCULATES = (
    f"--config={CALCULATOR / 'grpo.toml'}",
    f"--data={CALCULATOR / 'train.jsonl'}",
    f"--reward={CALCULATOR / 'hooks.py'}:right",
    f"--hooks.generate={CALCULATOR / 'hooks.py'}:solve",
)
# Verdict 0 is there only once a later answer is judged, so a run that waits for it first fails.
CHAIN = """
import asyncio
drawn = None

async def judge(prompt, sample):
    global drawn
    drawn = drawn or asyncio.Event()
    if prompt.uid == LATER:
        drawn.set()
    if prompt.uid == 0:
        await drawn.wait()
    return float((sample.tokens % 2 == 0).mean())
"""
ONE_PROCESS = ("--hooks.processes=1", "--hooks.deadline_s=300")


def pupil(run: Any, *words: str) -> Path:
    """Return a model folder that has imitated the careless teacher of the calculator."""
    ended = run(
        "sft",
        f"--config={CALCULATOR / 'sft.toml'}",
        f"--model={EXAMPLE / 'model'}",
        f"--data={CALCULATOR / 'warmup.jsonl'}",
        *words,
        name="pupil",
        small=False,
    )
    assert ended.code == 0, ended.sentence
    return ended.folder / "hf"


def check_episodes(ended: Ended) -> None:
    """Bits are equal, and what the calculator said is neither compared nor learned."""
    assert ended.code == 0, ended.sentence
    for row in ended.metrics:
        samples = ended.samples(row["step"])
        drawn = sum(version >= 0 for sample in samples for version in sample["versions"])
        assert row["onpolicy/mismatched_tokens"] == 0
        assert row["onpolicy/compared_tokens"] == drawn
        for sample in samples:
            pairs = [*zip(sample["versions"], sample["logprobs"], strict=True)]
            assert all(version == row["step"] - 1 for version, _ in pairs if version >= 0)
            assert all(logprob == 0 for version, logprob in pairs if version < 0)
            observed = sum(version < 0 for version, _ in pairs)
            assert observed == sum(len(part.partition(";")[0]) + 2 for part in results(sample))


def results(sample: dict[str, Any]) -> list[str]:
    """What follows each `=` of the text, to the next `;`."""
    return sample["text"].split("]=")[1:]


def test_the_calculator_is_called(run: Any) -> None:
    """The model is a beginner, but tries."""
    model = pupil(run, "--steps=40", "--trainer.total_steps=40", "--pairs_per_step=64")
    words = (f"--model={model}", "--steps=2", "--prompts_per_step=8")
    ended = run("grpo", *CALCULATES, *words, nproc=2, small=False)
    check_episodes(ended)
    called = [row for row in ended.samples(1) if results(row)]
    assert called
    assert {row["parts"]["calls"] for row in called} >= {1.0}


@pytest.mark.system
def test_the_calculator_is_learned(run: Any) -> None:
    ended = run("grpo", *CALCULATES, f"--model={pupil(run)}", nproc=2, small=False)
    check_episodes(ended)
    rewards = [row["reward/mean"] for row in ended.metrics]
    assert len(rewards) == 60
    assert sum(rewards[-5:]) / 5 > rewards[0] + 0.3


def test_two_ranks_share_the_experts_of_a_mixture(run: Any) -> None:
    data = EXAMPLE / "train.jsonl", EXAMPLE / "warmup.jsonl", EXAMPLE / "eval.jsonl"
    names = "data", "warmup_data", "eval.data"
    ended = run(
        str(EXAMPLE / "recipe.py"),
        f"--config={REPO / 'examples/experts/cpu.toml'}",
        f"--model={REPO / 'examples/experts/model'}",
        f"--reward={EXAMPLE / 'reward.py'}:correct",
        *(f"--{name}={file}" for name, file in zip(names, data, strict=True)),
        "--warmup_steps=20",
        "--steps=2",
        nproc=2,
        small=False,
    )
    assert ended.code == 0, ended.sentence
    trained = [row for row in ended.metrics if "reward/mean" in row]
    assert len(trained) == 2
    for row in trained:
        assert row["onpolicy/compared_tokens"] > 500
        assert row["onpolicy/mismatched_tokens"] == row["onpolicy/router_flips"] == 0


def test_decoding_goes_on_while_a_verdict_is_waited_for(run: Any, tmp_path: Path) -> None:
    """The engine has room for two answers at a time; the last prompt is judged before the first."""
    file = tmp_path / "chain.py"
    file.write_text(CHAIN.replace("LATER", "7"))
    words = (f"--reward={file}:judge", *ONE_PROCESS, "--engine.max_batch=2", "--steps=1")
    ended = run("grpo", *words)
    assert ended.code == 0, ended.sentence
    assert ended.metrics[0]["onpolicy/mismatched_tokens"] == 0


def test_a_later_step_is_generated_while_a_verdict_is_waited_for(run: Any, tmp_path: Path) -> None:
    """The first step needs a verdict that a prompt of the third step sets free."""
    file = tmp_path / "chain.py"
    file.write_text(CHAIN.replace("LATER", "16"))
    words = (f"--reward={file}:judge", *ONE_PROCESS, "--sampler.max_lag=2", "--steps=3")
    ended = run("grpo_fully_async", *words, nproc=2)
    assert ended.code == 0, ended.sentence
    learned = [{row["prompt_uid"] for row in ended.samples(step)} for step in (1, 2, 3)]
    assert learned == [{*range(8)}, {*range(8, 16)}, {*range(16, 24)}]
    assert [row["onpolicy/mismatched_tokens"] for row in ended.metrics] == [0, 0, 0]

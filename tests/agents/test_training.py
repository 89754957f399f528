"""Training in environments that nobody here wrote: rewards rise, and every bit is equal."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.types.samples import AGENT, TURN_RECORDS
from tests.dist.recipes.conftest import REPO, Ended, run_in

pytestmark = pytest.mark.agents

MODEL = REPO / "examples/environments/model"
LAST = "Now provide only the final numeric answer in the exact format: '#### ANSWER'."
CHAT = ("--prompts.chat_template=true",)


def write(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def longer_model(folder: Path, num_tokens: int) -> Path:
    """Return the model of the example with room for more tokens."""
    model = folder / "model"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = num_tokens
    (model / "config.json").write_text(json.dumps(config))
    return model


def pupil(folder: Path, model: Path, games: Iterable[list[dict[str, str]]], steps: int) -> Path:
    """Return a model that has imitated these conversations."""
    data = write(folder / "games.jsonl", ({"messages": game} for game in games))
    ended = run_in(
        folder,
        "sft",
        f"--model={model}",
        f"--data={data}",
        *CHAT,
        "--prompts.prompt_key=messages",
        "--prompts.answer_key=",
        f"--steps={steps}",
        "--pairs_per_step=64",
        "--trainer.init=random",
        "--trainer.lr=4e-3",
        "--trainer.schedule=linear",
        "--trainer.warmup_steps=15",
        f"--trainer.total_steps={steps}",
        "--trainer.betas=[0.9,0.99]",
        name="pupil",
        small=False,
    )
    assert ended.code == 0, ended.sentence
    return ended.folder / "hf"


def check_bits(ended: Ended, *, has_turns: bool = True) -> None:
    """Each drawn token was compared, and none differs; turns are where tokens were drawn."""
    assert ended.code == 0, ended.sentence
    for row in ended.metrics:
        samples = ended.samples(row["step"])
        drawn = sum(version >= 0 for sample in samples for version in sample["versions"])
        assert row["onpolicy/mismatched_tokens"] == 0
        assert row["onpolicy/compared_tokens"] == drawn
        assert row.get("reward/failed_samples", 0) == 0
        if has_turns:
            turns = [turn for one in samples for turn in one["metadata"][TURN_RECORDS]]
            assert sum(turn["num_tokens"] for turn in turns) == drawn


def careless(rng: random.Random, care: float) -> list[dict[str, str]]:
    """Return a conversation of gsm8k_multi_turn about a sum, with a careless teacher."""
    one, other = rng.randint(0, 4), rng.randint(0, 4)
    messages = [{"role": "user", "content": f"{one}+{other}="}]
    for shown in (LAST, ""):
        said = one + other if rng.random() < care else rng.randint(0, 8)
        messages.append({"role": "assistant", "content": f"#### {said}"})
        if said == one + other or not shown:
            break
        messages.append({"role": "user", "content": shown})
    return messages


def test_skyrl_gym_teaches_sums(tmp_path: Path) -> None:
    pytest.importorskip("skyrl_gym")
    rng = random.Random(0)
    model = pupil(
        tmp_path, longer_model(tmp_path, 256), (careless(rng, 0.4) for _ in range(2000)), 150
    )
    sums = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5))
    ended = run_in(
        tmp_path,
        "grpo",
        f"--model={model}",
        f"--data={write(tmp_path / 'sums.jsonl', sums)}",
        "--reward=environment",
        *CHAT,
        "--agent.kind=skyrl_gym",
        "--agent.name=gsm8k_multi_turn",
        "--agent.max_turns=2",
        "--steps=40",
        "--prompts_per_step=16",
        "--sampling.num_samples=8",
        "--sampling.max_tokens=10",
        "--trainer.lr=2e-3",
        "--trainer.betas=[0.9,0.99]",
        name="sums",
        small=False,
    )
    check_bits(ended)
    rewards = [row["reward/mean"] for row in ended.metrics]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3, rewards


def test_both_players_of_textarena_are_learned_with_equal_bits(tmp_path: Path) -> None:
    """In the first turns of this game any text is legal, even that of a random model."""
    pytest.importorskip("textarena")
    records = ({"prompt": "a game", "answer": str(number)} for number in range(4))
    ended = run_in(
        tmp_path,
        "grpo",
        f"--model={longer_model(tmp_path, 4096)}",
        f"--data={write(tmp_path / 'games.jsonl', records)}",
        "--reward=environment",
        *CHAT,
        "--agent.kind=textarena",
        "--agent.name=IteratedPrisonersDilemma-v0-raw",
        '--agent.args={"num_players": 2}',
        "--trainer.init=random",
        "--steps=1",
        "--agent.max_turns=4",
        "--prompts_per_step=2",
        "--sampling.num_samples=2",
        "--sampling.max_tokens=4",
        name="dilemma",
        small=False,
    )
    check_bits(ended)
    samples = ended.samples(1)
    agents = {sample["metadata"][AGENT] for sample in samples}
    assert agents == {"player 0", "player 1"}
    # a special token in a drawn text makes another sample begin, because the template drops it
    assert len(samples) >= 2 * 2 * 2
    assert all(sample["context"] for sample in samples)

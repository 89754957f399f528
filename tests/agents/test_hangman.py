"""Hangman of verifiers' own taskset of games, unmodified: a tiny model learns the letters."""

from __future__ import annotations

import importlib
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.agents.lines import Conversation, lines_model
from tests.agents.test_training import CHAT, check_bits, pupil
from tests.dist.recipes.conftest import run_in

pytestmark = pytest.mark.agents

GAME = "Hangman-v0"
LETTERS = "abcdefgh"  # of the teacher, who guesses at random


@pytest.fixture
def taskset(five_words: None) -> Any:
    """The module of the taskset."""
    for name in ("verifiers", "textarena"):
        pytest.importorskip(name)
    return importlib.import_module("verifiers.v1.tasksets.textarena.taskset")


def random_game(taskset: Any, seed: int) -> Conversation:
    """Return a game as the taskset shows it, played with letters at random."""
    random.seed(seed)
    game = taskset.ta.make(env_id=GAME)
    game.reset(num_players=1)
    shown = str(game.get_observation()[1])
    told = [{"role": "system", "content": taskset.SYSTEM_PROMPT}]
    while True:
        said = f"[{random.choice(LETTERS)}]"
        told += [{"role": "user", "content": shown}, {"role": "assistant", "content": said}]
        game.step(said)
        if game.state.done:
            return told
        shown = taskset._latest_feedback(str(game.get_observation()[1]))


def test_hangman_is_learned_in_ten_steps(taskset: Any, tmp_path: Path) -> None:
    from spmd_rl.environments.verifiers import write_prompts

    games = [random_game(taskset, seed) for seed in range(1500)]
    beginner = pupil(tmp_path, lines_model(tmp_path, games), games, 100)
    write_prompts(tmp_path / "train.jsonl", "textarena", {"taskset": {"game": GAME}}, num=64)
    began_s = time.monotonic()
    ended = run_in(
        tmp_path,
        "grpo",
        f"--model={beginner}",
        f"--data={tmp_path / 'train.jsonl'}",
        "--reward=environment",
        *CHAT,
        "--prompts.answer_key=",
        "--agent.kind=verifiers",
        "--agent.name=textarena",
        f'--agent.args={{"taskset": {{"game": "{GAME}"}}}}',
        "--steps=10",
        "--prompts_per_step=16",
        "--sampling.num_samples=4",
        "--sampling.max_tokens=8",
        "--trainer.lr=1e-3",
        "--trainer.betas=[0.9,0.99]",
        name="hangman",
        small=False,
    )
    took_s = time.monotonic() - began_s
    check_bits(ended, has_turns=False)
    rewards = [row["reward/mean"] for row in ended.metrics]
    print(f"{took_s:.0f} s, rewards {[round(one, 3) for one in rewards]}")
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1, rewards

"""Kuhn poker of textarena, learned by self-play alone: the policy then beats moves at random."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from spmd_rl.environments.environment import AgentReply
from spmd_rl.environments.textarena import TextArena
from tests.agents.lines import Conversation, lines_model
from tests.agents.opponents import any_move
from tests.agents.test_training import CHAT, check_bits, pupil, write
from tests.dist.recipes.conftest import run_in
from tests.unit.environments.cases import chat_prompt

pytestmark = pytest.mark.agents

GAME = ("--agent.kind=textarena", "--agent.name=KuhnPoker-v0")
ARGS = {"num_players": 2, "max_rounds": 3}
OPPONENT = f"{Path(__file__).parent / 'opponents.py'}:any_move"


async def random_game(seed: int) -> list[Conversation]:
    """Return what both players of a game have read and said, if they say anything legal."""
    game, rng = TextArena("KuhnPoker-v0", ARGS), np.random.default_rng(seed)
    seen = await game.reset(chat_prompt(), rng)
    told: dict[str, Conversation] = {}
    while not seen.done:
        conversation = told.setdefault(seen.agent, [])
        conversation += [dict(one) for one in seen.messages]
        said = any_move(conversation[-1]["content"], rng)
        conversation.append({"role": "assistant", "content": said})
        seen = await game.step(AgentReply(said))
    return [*told.values()]


def win_rate(folder: Path, model: Path, games: Path, name: str) -> float:
    """Return the share of games that a policy wins against moves at random; a draw is no win."""
    args = ARGS | {"opponent": OPPONENT}
    ended = run_in(
        folder,
        "evaluate",
        f"--model={model}",
        f"--data={games}",
        "--reward=environment",
        *CHAT,
        *GAME,
        f"--agent.args={json.dumps(args)}",
        "--sampling.num_samples=2",
        "--sampling.max_tokens=8",
        "--threshold=1",
        name=name,
        small=False,
    )
    assert ended.code == 0, ended.sentence
    (scores,) = json.loads((ended.folder / "eval.json").read_text())["sets"].values()
    return float(scores["pass@1"])


def test_self_play_beats_moves_at_random(tmp_path: Path) -> None:
    """The policy plays both seats while it learns, and never meets the opponent of the test."""
    pytest.importorskip("textarena")
    games = [one for seed in range(2000) for one in asyncio.run(random_game(seed))]
    model = lines_model(tmp_path, games)
    beginner = pupil(tmp_path, model, games, 120)
    records = [{"prompt": "a game", "answer": str(number)} for number in range(800)]
    train, test = write(tmp_path / "t.jsonl", records), write(tmp_path / "e.jsonl", records[:512])
    ended = run_in(
        tmp_path,
        "grpo",
        f"--model={beginner}",
        f"--data={train}",
        "--reward=environment",
        *CHAT,
        *GAME,
        f"--agent.args={json.dumps(ARGS)}",
        "--steps=40",
        "--prompts_per_step=16",
        "--sampling.num_samples=8",
        "--sampling.max_tokens=8",
        "--trainer.lr=1e-3",
        "--trainer.betas=[0.9,0.99]",
        name="poker",
        small=False,
    )
    check_bits(ended)
    before = win_rate(tmp_path, beginner, test, "before")
    after = win_rate(tmp_path, ended.folder / "hf", test, "after")
    print(f"wins against moves at random: {before:.3f} before, {after:.3f} after self-play")
    assert after > max(0.6, before + 0.1)

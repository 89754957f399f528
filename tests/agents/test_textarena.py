"""Games of textarena, unmodified: self-play, an opponent, and games that do not disturb others."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd_rl.environments.config import AgentConfig
from spmd_rl.environments.environment import AgentReply
from spmd_rl.environments.make import check_agent, environment_maker
from spmd_rl.environments.textarena import TextArena
from spmd_rl.errors import ConfigError
from spmd_rl.types.samples import AGENT, TURN_RECORDS
from tests.unit.environments.cases import SpokenEngine, chat_prompt, episode

pytestmark = pytest.mark.agents

ta = pytest.importorskip("textarena")
OPPONENT = f"{Path(__file__).parent / 'opponents.py'}:any_move"
KUHN = {"num_players": 2, "max_rounds": 1}


@pytest.mark.parametrize("name", ["KuhnPoker-v0", "KuhnPoker-v0-raw"])
@pytest.mark.parametrize(
    "said", [["[bet]", "[fold]"], ["[check]", "[check]"], ["[check]", "[bet]", "[call]"]]
)
def test_self_play_is_the_game_that_a_direct_call_plays(name: str, said: list[str]) -> None:
    make = environment_maker(AgentConfig(kind="textarena", name=name, args=KUHN))
    samples = episode(make(), SpokenEngine(said), seed=5)
    direct = ta.make("KuhnPoker-v0-raw", max_rounds=1)
    rng = np.random.default_rng(5)
    rng.integers(2)  # the seat
    direct.reset(2, seed=int(rng.integers(1 << 31)))
    seen: dict[str, list[str]] = {}
    for text in said:
        player, shown = direct.get_observation()
        seen.setdefault(f"player {player}", []).extend(
            one for sender, one, _ in shown if sender != player
        )
        is_done, _ = direct.step(text)
    assert is_done
    rewards, _ = direct.close()
    assert {one.metadata[AGENT]: one.reward for one in samples} == {
        f"player {player}": reward for player, reward in rewards.items()
    }
    assert sum(one.reward for one in samples) == 0
    for sample in samples:
        told = sample.metadata[TURN_RECORDS]
        assert len({turn["state"] for turn in told}) == len(told)


def test_an_agent_sees_the_game_and_no_question_of_the_record() -> None:
    make = environment_maker(AgentConfig(kind="textarena", name="KuhnPoker-v0-raw", args=KUHN))
    prompt = chat_prompt("a record")
    messages = [{"role": "system", "content": "be brave"}, *prompt.chat["messages"]]
    engine = SpokenEngine(["[bet]", "[fold]"])
    samples = episode(make(), engine, prompt.replace(chat={"messages": messages}))
    assert len(samples) == 2
    for past in engine.pasts:
        assert "be brave" in past
        assert "Kuhn Poker" in past
        assert "a record" not in past
    assert "submitted move: '[bet]'" in engine.pasts[1]


@pytest.mark.parametrize("seat", [0, 1])
def test_an_opponent_plays_the_other_seat(seat: int) -> None:
    args = {**KUHN, "opponent": OPPONENT, "seat": seat, "max_rounds": 3}
    make = environment_maker(AgentConfig(kind="textarena", name="KuhnPoker-v0", args=args))
    (sample,) = episode(make(), SpokenEngine(["[check]", "[fold]"] * 9))
    assert sample.metadata[AGENT] == f"player {seat}"
    assert sample.reward in (-1, 0, 1)


def test_samples_of_a_prompt_begin_in_one_game() -> None:
    make = environment_maker(
        AgentConfig(kind="textarena", name="GuessTheNumber-v0", args={"max_turns": 9})
    )

    def found(seed: int) -> list[float]:
        return [
            episode(make(), SpokenEngine([f"[{number}]", "", ""]), seed=seed)[0].reward
            for number in range(1, 21)
        ]

    assert found(3) == found(3)
    assert sorted(found(3)) == [0.0] * 19 + [1.0]
    assert len({tuple(found(seed)) for seed in range(6)}) > 2


async def turns(game: TextArena, seed: int, said: list[str]) -> list[Any]:
    """Play beside others, with a wait after each call."""
    seen: list[Any] = [await game.reset(chat_prompt(), np.random.default_rng(seed))]
    for text in said:
        await asyncio.sleep(0)
        random.random()
        seen.append(await game.step(AgentReply(text)))
    return seen


def test_games_do_not_disturb_each_other() -> None:
    """KuhnPoker draws the cards of each round from the module random."""
    args = {"num_players": 2, "max_rounds": 9}
    said = ["[check]", "[check]"] * 8

    async def all_at_once(seeds: list[int]) -> list[Any]:
        games = [TextArena("KuhnPoker-v0-raw", args) for _ in seeds]
        return list(
            await asyncio.gather(*(turns(*one, said) for one in zip(games, seeds, strict=True)))
        )

    together = asyncio.run(all_at_once([1, 2, 3]))
    alone = [asyncio.run(all_at_once([seed]))[0] for seed in (1, 2, 3)]
    assert together == alone
    assert together[0] != together[1]


def test_a_game_leaves_the_module_random_alone() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    asyncio.run(turns(TextArena("KuhnPoker-v0", KUHN), 3, []))
    assert random.random() == expected


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        ("Chess-v9", {}, "no game of this name"),
        ("KuhnPoker-v0", {"opponent": "nowhere.py:f"}, "there is no file"),
    ],
)
def test_what_is_missing_is_named(name: str, args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_agent(AgentConfig(kind="textarena", name=name, args=args))

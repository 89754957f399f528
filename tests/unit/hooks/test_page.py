"""The Python of docs/hooks.md is what a user may copy: it loads, and does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.context import CallInfo, Keep
from spmd_rl.hooks.controller_hooks import KeepGroup
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import EngineCall, EpisodeTask
from spmd_rl.hooks.signatures import RewardForm, check_hooks, load_reward
from spmd_rl.hooks.transcript import Turn
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from spmd_rl.types.token_data import TokenData
from tests.unit.hooks.cases import character_model, events_of, make_prompt, make_sample

PAGE = Path(__file__).parents[3] / "docs/hooks.md"
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def hooks(tmp_path: Path) -> str:
    file = tmp_path / "hooks_page.py"
    file.write_text("\n".join(_PYTHON.findall(PAGE.read_text(encoding="utf-8"))))
    return str(file)


def test_rewards(hooks: str) -> None:
    prompt, short, long = make_prompt(), make_sample("85"), make_sample("it is 86")
    score: Any = load_reward(f"{hooks}:score").function
    assert score(prompt, short) == {"reward": 1.1, "right": True, "ended": True}
    assert score(prompt, long)["reward"] == 0.1
    order = load_reward(f"{hooks}:order")
    assert order.form.whole_group
    assert order.function(prompt, [long, short]) == [0.5, 1.0]
    assert load_reward(f"{hooks}:judge").form == RewardForm(True, False, True)


def test_the_choice_of_groups(hooks: str) -> None:
    keep = KeepGroup(f"{hooks}:keep")
    samples = [make_sample(index=n).replace(reward=float(n)) for n in range(2)]
    assert keep(Group(make_prompt(), samples)) == Keep(True)
    assert keep(Group(make_prompt(), samples[:1] * 2)) == Keep(False, "all alike")


def play(hook: str, prompt: Prompt, said: list[str]) -> Sample:
    """Return the sample of an episode. Its engine says what a model should."""

    def answer(call: EngineCall) -> None:
        text = said.pop(0)
        tokens = np.array([*map(ord, text)], np.int32)
        versions = np.zeros(len(text), np.int32)
        turn = Turn(TokenData(tokens, np.zeros(len(text), np.float32), versions), text)
        pool.reply(call.task_id, call.call_id, turn)

    cfg = HookConfig(generate=hook)
    check_hooks(cfg)
    with HookPool(cfg, model=character_model()) as pool:
        task = pool.submit(EpisodeTask(prompt, 0, 1, 1.0, CallInfo()))
        event: Any = events_of(pool, answer)[task]
    (sample,) = event.samples
    assert isinstance(sample, Sample)
    return sample


def test_the_episode(hooks: str) -> None:
    sample = play(f"{hooks}:play", make_prompt(), ["<call>37+48</call>", "85"])
    assert "".join(map(chr, sample.tokens)) == "<call>37+48</call><result>85</result>85"
    assert sample.mask.sum() == len("<call>37+48</call>85")


def test_the_conversation(hooks: str) -> None:
    chat = {"messages": [{"role": "user", "content": "37+48"}]}
    prompt = make_prompt(text="user: 37+48\nassistant: ").replace(chat=chat)
    sample = play(f"{hooks}:talk", prompt, ["<call>37+48</call>", "85"])
    expected = "<call>37+48</call>\ntool: 85\nassistant: 85"
    assert "".join(map(chr, sample.tokens)) == expected
    assert sample.mask.sum() == len("<call>37+48</call>85")

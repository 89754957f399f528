"""Mixtures: shares of sources at every prefix, places that a resumed run finds again, and names."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.data.mixture import Mixture, data_weights, source_names
from spmd_rl.data.prompts import PromptConfig, Prompts
from spmd_rl.errors import ConfigError, DataError

Jsonl = Callable[..., str]
weights = st.lists(st.integers(1, 20), min_size=2, max_size=5)


def named(values: list[int]) -> dict[str, float]:
    return {f"s{number}": float(value) for number, value in enumerate(values)}


@settings(max_examples=25)
@given(weights, st.integers(0, 2**31))
def test_shares_are_close_at_every_prefix(values: list[int], seed: int) -> None:
    places = Mixture(named(values), seed=seed).places(range(9000))
    sources = np.array([source for source, _ in places])
    for source, value in enumerate(values):
        counts = np.cumsum(sources == source)
        shares = np.arange(1, 9001) * value / sum(values)
        assert np.abs(counts - shares).max() < 6
        own = [place for of, place in places if of == source]
        assert own == [*range(len(own))], "each source is drawn in its own order, without a gap"


@settings(max_examples=25)
@given(weights, st.lists(st.integers(0, 30_000), min_size=1, max_size=6))
def test_a_place_does_not_depend_on_what_was_asked_before(
    values: list[int], draws: list[int]
) -> None:
    whole = Mixture(named(values), seed=1).places(range(30_001))
    mixture = Mixture(named(values), seed=1)
    assert mixture.places(draws) == [whole[draw] for draw in draws]
    assert mixture.places(draws[::-1]) == [whole[draw] for draw in draws[::-1]]


def test_seeds_differ_and_the_places_never_change() -> None:
    first, other = (Mixture(named([1, 2]), seed=seed).places(range(50)) for seed in (0, 1))
    assert first != other
    # as it was when this test was written
    assert "".join(str(source) for source, _ in first[:24]) == "101101101011011110110101"


def test_weights_by_step() -> None:
    calls = []

    def pick(step: int, sources: list[str]) -> dict[str, float]:
        calls.append(step)
        return {"s0": 1.0} if step < 3 else {"s1": 3, "s0": 1}

    mixture = Mixture(named([1, 1, 1]), seed=0, pick=pick, per_step=10)
    counts = Counter(source for source, _ in mixture.places(range(30)))
    assert counts == {0: 30}
    counts = Counter(source for source, _ in mixture.places(range(30, 4096)))
    assert set(counts) == {0, 1}
    assert abs(counts[1] - 4066 * 3 / 4) < 6
    assert {*calls} == set(range(410))
    late = Mixture(named([1, 1, 1]), seed=0, pick=pick, per_step=10)
    assert late.places([9000]) == [mixture.places(range(9001))[-1]]


def test_a_source_of_weight_0_is_never_drawn() -> None:
    """Not at a draw that falls exactly on the bound of its share either."""
    mixture = Mixture(named([1, 1]), seed=0, pick=lambda step, sources: {"s1": 1.0})
    mixture._offset = np.uint64(0)  # the first draw falls on 0
    assert mixture.places(range(3)) == [(1, 0), (1, 1), (1, 2)]
    halves = Mixture(named([1, 1]), seed=0)
    halves._offset = np.uint64(1 << 63)  # on one half, where the second source begins
    assert halves.places([0]) == [(1, 0)]


def test_the_last_two_blocks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws that go on, with some given back just behind them, place no block again."""
    mixture, made = Mixture(named([1, 2]), seed=0), []
    sources = mixture._sources
    monkeypatch.setattr(mixture, "_sources", lambda block: made.append(block) or sources(block))
    size = 4096
    for block in range(4):
        mixture.places([block * size])
        made.clear()
        mixture.places([draw for draw in (block * size - 1, block * size + 1) if draw >= 0])
        assert made == []


@pytest.mark.parametrize("answer", [{}, {"s0": 0.0}, {"s9": 1.0}, {"s0": -1}, {"s0": "1"}, None, 3])
def test_weights_by_step_that_cannot_be_used(answer: Any) -> None:
    mixture = Mixture(named([1, 1]), seed=0, pick=lambda step, sources: answer)
    with pytest.raises(ConfigError, match=r"hooks.pick_sources returned .* for step 1: it must"):
        mixture.places([0])


@pytest.mark.parametrize("data", ["", {}, {"": 1.0}])
def test_no_data(data: Any) -> None:
    with pytest.raises(ConfigError, match="--data is missing"):
        data_weights(data)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_is_above_0(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"data: the weight of b.csv must be above 0 and finite"):
        data_weights({"a.csv": 1.0, "b.csv": weight})


def test_names_of_sources(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").touch()
    (tmp_path / "chat.v2").mkdir()
    one, other = f"{tmp_path}/a/train.jsonl", f"{tmp_path}/b/train.jsonl"
    assert source_names([one]) == ["train"]
    assert source_names([one, f"{tmp_path}/chat.v2@[:9]"]) == ["train", "chat.v2"]
    assert source_names([one, other]) == ["a-train", "b-train"]
    assert source_names([f"{one}@[:5]", f"{one}@[5:]"]) == ["train-1", "train-2"]


def test_prompts_of_a_mixture(jsonl: Jsonl, tokenizer: Any) -> None:
    lines = [json.dumps({"prompt": f"{i}?", "answer": str(i)}) for i in range(7)]
    data = {jsonl(*lines, name="easy.jsonl"): 3.0, jsonl(*lines[:4], name="hard.jsonl"): 1.0}
    prompts, resumed = (Prompts(data, PromptConfig(), tokenizer) for _ in range(2))
    taken = prompts.take(40)
    assert [prompt.uid for prompt in taken] == [*range(40)]
    counts = Counter(prompt.source for prompt in taken)
    assert set(counts) == {"easy", "hard"}
    assert abs(counts["easy"] - 30) < 3
    for source, num in (("easy", 7), ("hard", 4)):
        own = [prompt.text for prompt in taken if prompt.source == source]
        assert sorted(own[:num]) == sorted(f"{i}?" for i in range(num)), "each once an epoch"
    assert len(prompts) == 11
    prompts.give_back([taken[3], taken[20]])
    resumed.restore(json.loads(json.dumps(prompts.state())))
    again, same = prompts.take(9), resumed.take(9)
    assert [prompt.uid for prompt in again] == [3, 20, *range(40, 47)]
    for one, other in zip(again, same, strict=True):
        assert (one.uid, one.text, one.source) == (other.uid, other.text, other.source)
    assert [prompt.text for prompt in again[:2]] == [taken[3].text, taken[20].text]


def test_a_mixture_notices_changed_data(jsonl: Jsonl, tokenizer: Any) -> None:
    line = '{"prompt": "1?", "answer": "1"}'
    data = {jsonl(line, name="a.jsonl"): 1.0, jsonl(line, name="b.jsonl"): 1.0}
    state = Prompts(data, PromptConfig(), tokenizer).state()
    jsonl(line.replace("1", "2"), name="b.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl, .*b\.jsonl: the prompts are not those"):
        Prompts(data, PromptConfig(), tokenizer).restore(state)

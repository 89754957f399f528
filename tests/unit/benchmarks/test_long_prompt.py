"""The benchmark of a long prompt, on a CPU with a small model and steps that are planned apart."""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np
import pytest
import torch

from benchmarks import long_prompt
from benchmarks.long_prompt import Arrival, Chunk, Decoding, rows_of, unequal
from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.native.prefill_cost import PrefillCost
from spmd_rl.types.samples import Sample
from tests.specs import attention_of, dense_spec
from tests.unit.rollout.test_long_prompts import plan_apart

COST = PrefillCost(token_s=1.0, key_s=0.01, tile_tokens=4, wave_tokens=8)


class Mark:
    """Stands for an event of the GPU."""

    def elapsed_time(self, end: Mark) -> float:
        return 1.0


@pytest.fixture
def model(tmp_path, monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    for name, value in {"NUM_DECODING": 4, "PROMPT": 100, "SHORT": 8, "SETTLED": 6}.items():
        monkeypatch.setattr(long_prompt, name, value)
    monkeypatch.setattr(long_prompt, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(long_prompt, "mark", Mark)
    spec = dense_spec(
        family="qwen3", vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=8, max_positions=512, theta=1e6,
        tie_embeddings=True, qk_norm=True,
    )  # fmt: skip
    model = CausalLM(spec)
    model.load_state_dict(dict(random_weights(spec, 0)))
    return model.requires_grad_(False)


def arrival(model: CausalLM, most_s: float) -> Arrival:
    one = Decoding(model, 40.0, num_pages=200, max_step_tokens=32)
    plan_apart(one.engine, COST, most_s)
    one.begin()
    one.arrive(long_prompt.NUM_DECODING)
    return one.arrive(long_prompt.NUM_DECODING + 1)


def test_arrivals_are_measured_in_chunks_and_give_the_same_bits(model: CausalLM, capsys) -> None:
    bounded, whole = arrival(model, 20.0), arrival(model, math.inf)
    assert [chunk.length for chunk in whole.chunks] == [32, 32, 32, 4]
    assert [chunk.length for chunk in bounded.chunks] == [16] * 2 + [8] * 8 + [4]
    for found in (bounded, whole):
        lengths = [chunk.length for chunk in found.chunks]
        assert [chunk.start for chunk in found.chunks] == list(accumulate(lengths, initial=0))[:-1]
        assert 0 < found.decode_s <= found.gap_s
        assert found.own_s > 0
    assert len(bounded.sample.tokens) == long_prompt.PROMPT_ANSWER
    assert unequal(bounded.sample, whole.sample) == 0
    long_prompt.print_chunks(bounded, COST)
    assert capsys.readouterr().out.startswith("   16 tokens behind     0:")


def measured(gap_s: float, own_s: float) -> Arrival:
    tokens = np.arange(3, dtype=np.int32)
    sample = Sample(1, 0, tokens, -np.ones(3, np.float32), tokens, "length")
    return Arrival(gap_s, own_s, 0.002, [Chunk(0, 100, 0.03)], sample)


@pytest.mark.parametrize(
    ("gap_s", "own_s", "holds"),
    [(0.045, 1.09, [True, True]), (0.051, 1.0, [False, True]), (0.03, 1.2, [True, False])],
)
def test_bars(gap_s: float, own_s: float, holds: list[bool]) -> None:
    bounded = [measured(0.02, own_s), measured(gap_s, own_s)]
    rows = list(rows_of(bounded, [measured(1.2, 1.0)] * 2))
    assert [row.holds for row in rows if row.holds is not None] == [*holds, True]
    assert rows[0].value == pytest.approx(1e3 * gap_s)


def test_a_bit_that_differs_is_seen() -> None:
    one, other = measured(0.01, 1.0), measured(0.01, 1.0)
    other.sample.logprobs[1] = np.nextafter(other.sample.logprobs[1], 0)
    assert unequal(one.sample, other.sample) == 1
    assert list(rows_of([one], [other]))[-1].holds is False


def test_the_shape_holds_the_prompt(tmp_path) -> None:
    spec = long_prompt.shape(tmp_path)
    assert spec.max_positions >= long_prompt.PROMPT + long_prompt.PROMPT_ANSWER
    assert (spec.num_layers, attention_of(spec).num_heads, spec.hidden_size) == (28, 16, 1024)

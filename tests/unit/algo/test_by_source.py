"""Measurements by source: the mean over a source, however the batch is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algo.dpo import bradley_terry_loss, dpo_loss
from spmd_rl.algo.losses import LossInput, ValueInput, sft_loss
from spmd_rl.algo.packing import pack_sft
from spmd_rl.algo.pair_packing import pack_pairs
from spmd_rl.types.batch import Batch
from spmd_rl.types.sequence_ends import sequence_ends
from spmd_rl.types.sft_pair import SftPair

sources = st.lists(st.sampled_from(["a", "b", "c-d", ""]), min_size=1, max_size=9)


def sequence(length: int, source: str) -> SftPair:
    return SftPair(np.arange(length, dtype=np.int32), np.arange(length) >= 1, source)


def language_input(batch: Batch, logprobs: Any) -> LossInput:
    """What the trainer gives a loss for a whole batch."""
    rows = np.flatnonzero(batch.mask)
    of = np.repeat(np.arange(batch.num_sequences), batch.lengths)[rows]
    columns = {name: torch.tensor(column[rows]) for name, column in batch.columns.items()}
    values = torch.tensor(logprobs[rows])
    return LossInput(
        values, values, values, values, values, torch.tensor(of), batch.num_sequences, columns
    )


@given(sources, st.integers(1, 4), st.integers(0, 99))
def test_of_tokens(names: list[str], num_shards: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(2, 7, len(names))
    batch = pack_sft([sequence(int(n), name) for n, name in zip(lengths, names, strict=True)])
    logprobs = -np.random.default_rng(seed).random(batch.num_tokens)
    batch = batch.with_columns(logprobs=logprobs.astype(np.float32))
    sums: dict[str, float] = {}
    for shard in batch.shard(num_shards):
        if shard.num_sequences:
            _, measured = sft_loss(language_input(shard, shard.columns["logprobs"]))
            for name, values in measured.items():
                sums[name] = sums.get(name, 0.0) + float(values.sum())
    found = {name: total / batch.denominator for name, total in sums.items()}
    expected = {}
    of_token = np.repeat(names, lengths)
    for name in {*names} if len({*names}) > 1 else ():
        own = batch.mask & (of_token == name)
        expected[f"source/{name or 'unnamed'}/loss"] = -logprobs[own].mean()
        expected[f"source/{name or 'unnamed'}/share"] = own.sum() / batch.mask.sum()
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_batch_of_one_source_has_no_columns() -> None:
    assert pack_sft([sequence(3, "a"), sequence(2, "a")]).columns == {}
    plain = [(np.arange(3, dtype=np.int32), np.arange(3) > 0)] * 2
    assert pack_sft(plain).columns == {}
    assert [*pack_pairs([(plain[0], plain[1])]).columns] == ["pair_scale"]


def test_of_pairs() -> None:
    names = ["a", "b", "a", "a"]
    batch = pack_pairs([(sequence(3 + n, one), sequence(2, one)) for n, one in enumerate(names)])
    rewards = np.array([2.0, 1.0, 0.5, 1.0, 3.0, 1.0, 1.0, 5.0], np.float32)
    margins = rewards[0::2] - rewards[1::2]
    of = np.array(names)
    expected = {
        f"source/{name}/{key}": float(value)
        for name in ("a", "b")
        for key, value in {
            "share": (of == name).mean(),
            "accuracy": (margins[of == name] > 0).mean(),
            "margin": margins[of == name].mean(),
        }.items()
    }

    # a reward model: one value for each answer
    ends = sequence_ends(batch)
    assert ends.columns["source/a"][ends.mask].tolist() == pytest.approx(
        [4 / 3] * 2 + [0] * 2 + [4 / 3] * 4
    )
    columns = {name: torch.tensor(column[ends.mask]) for name, column in ends.columns.items()}
    out = ValueInput(torch.tensor(rewards), torch.arange(8), 8, columns)
    _, measured = bradley_terry_loss(out)
    found = {name: float(values.mean()) for name, values in measured.items()}
    assert {k: v for k, v in found.items() if k.startswith("source/")} == pytest.approx(expected)

    # DPO: rewards are sums of log-probs, here all at the first learned token of each answer
    first = np.cumsum(batch.lengths) - batch.lengths + 1
    logprobs = np.zeros(batch.num_tokens, np.float32)
    logprobs[first] = rewards
    scored = batch.with_columns(reference_logprobs=np.zeros(batch.num_tokens, np.float32))
    _, measured = dpo_loss(language_input(scored, logprobs), beta=1.0)
    found = {name: float(values.mean()) for name, values in measured.items()}
    assert {k: v for k, v in found.items() if k.startswith("source/")} == pytest.approx(expected)

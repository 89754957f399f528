"""Draws of ranks that have parts of the vocabulary: those of one rank that has all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.kernels import sample_and_score, stream_bases
from spmd_rl.kernels.vocab import vocab_parallel
from spmd_rl.kernels.vocab.logprob import NUM_VOCAB_SHARDS, shard_size
from spmd_rl.kernels.vocab.vocab_parallel import vocab_parallel_sample
from spmd_rl.kernels.vocab.vocab_part import VocabPart
from tests.shared_ranks import Meeting, ThreadExchange, on_ranks

Draws = tuple[Tensor, Tensor]
DRAWN = vocab_parallel._drawn


class Rows:
    """Logits, of which many are equal where `levels` is small, with what each row asks for."""

    def __init__(self, num_rows: int, vocab: int, levels: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(num_rows, vocab, generator=generator) * 3
        self.logits = logits if levels == 0 else (logits.clamp(-2, 2) * levels).round() / levels
        self.scale = torch.rand(num_rows, generator=generator) * 2 + 0.2
        ids = np.arange(num_rows)
        self.bases = torch.from_numpy(stream_bases(seed, ids // 3, ids % 3))
        self.positions = torch.randint(0, 5000, (num_rows,), generator=generator)
        self.greedy = torch.arange(num_rows) % 3 == 1

    @property
    def settings(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.scale, self.bases, self.positions


def of_one(rows: Rows) -> Draws:
    return sample_and_score(rows.logits, *rows.settings, greedy=rows.greedy)


def of_ranks(
    rows: Rows, num_ranks: int, draw: Callable[..., Draws] = vocab_parallel_sample
) -> list[Draws]:
    size, meeting = rows.logits.shape[1], Meeting(num_ranks)
    width = shard_size(size) * NUM_VOCAB_SHARDS // num_ranks

    def of_rank(rank: int) -> Draws:
        own = rows.logits[:, rank * width : (rank + 1) * width].contiguous()
        part = VocabPart(rank, num_ranks, size, ThreadExchange(meeting, rank))
        return draw(own, *rows.settings, part, greedy=rows.greedy)

    return on_ranks(of_rank, num_ranks)


def unequal(found: Draws, wanted: Draws) -> int:
    return int((found[0] != wanted[0]).sum() + (found[1] != wanted[1]).sum())


@settings(max_examples=40, deadline=None)
@given(
    num_ranks=st.sampled_from([2, 4, 8]),
    num_rows=st.integers(1, 40),
    vocab=st.one_of(st.integers(57, 300), st.sampled_from([8192, 8200, 9001, 20011])),
    levels=st.sampled_from([0, 1, 4]),
    seed=st.integers(0, 1000),
)
def test_ranks_draw_what_one_does(
    num_ranks: int, num_rows: int, vocab: int, levels: int, seed: int
) -> None:
    """With greedy rows, equal entries, and vocabularies that the shards do not divide."""
    rows = Rows(num_rows, vocab, levels, seed)
    for found in of_ranks(rows, num_ranks):
        assert unequal(found, of_one(rows)) == 0


def test_of_equal_entries_the_lowest_id_is_drawn() -> None:
    rows = Rows(4, 160, 0, 0)
    rows.greedy[:] = True
    rows.logits[:, [37, 90, 155]] = 50.0
    for tokens, _ in of_ranks(rows, 4):
        assert tokens.tolist() == [37] * 4


def _backwards(entries: Tensor, sums: Tensor) -> Draws:
    """Adds the sums of the chunks from the last to the first."""
    return DRAWN(entries, sums.flip(1).contiguous())


def _by_rank(entries: Tensor, sums: Tensor) -> Draws:
    """Adds what a rank gave, and then the ranks."""
    of_rank = sums.view(len(sums), entries.shape[1], -1).sum(-1)
    return DRAWN(entries, of_rank)


@pytest.mark.parametrize("drawn", [_backwards, _by_rank])
def test_sums_in_another_order_are_seen(drawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control. Tokens do not depend on the sums."""
    rows = Rows(200, 9001, 0, 3)
    wanted = of_one(rows)
    monkeypatch.setattr(vocab_parallel, "_drawn", drawn)
    tokens, logprobs = of_ranks(rows, 4)[0]
    assert torch.equal(tokens, wanted[0])
    assert 0.05 < (logprobs != wanted[1]).float().mean() < 0.95


def test_noise_by_the_id_within_a_part_is_seen() -> None:
    """Negative control."""

    def draw(own: Tensor, *given: Any, greedy: Tensor) -> Draws:
        *others, part = given
        return vocab_parallel_sample(own, *others, replace(part, index=0), greedy=greedy)

    rows = Rows(60, 800, 0, 4)
    assert unequal(of_ranks(rows, 4, draw)[0], of_one(rows)) > 0


def test_a_row_without_numbers_has_no_logprob() -> None:
    rows = Rows(3, 160, 0, 5)
    rows.logits[1, 150] = torch.nan
    for _, logprobs in of_ranks(rows, 2):
        assert logprobs.isnan().tolist() == [False, True, False]

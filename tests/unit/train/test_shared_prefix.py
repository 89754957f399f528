"""Shared prompts are laid once: the same log-probability bits and the same gradients as sequences
laid whole.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.algo.packing import pack_sft
from spmd_rl.train import shared_prefix
from spmd_rl.types.batch import Batch

Pair = tuple[NDArray[np.int32], NDArray[np.bool_]]


def group(prompts: list[list[int]], answers: list[list[int]], copies: int) -> Batch:
    """Every prompt with `copies` of the answers, each a token longer than the one before."""
    pairs: list[Pair] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        for copy in range(copies):
            tokens = np.array([*prompt, *answer, *range(2, 2 + copy)], np.int32)
            pairs.append((tokens, np.arange(len(tokens)) >= len(prompt)))
    return pack_sft(pairs)


MASKS = (0, 0, 1, 0, 1, 0), (0, 0, 0, 0, 0, 0), (0, 0, 0, 1, 0, 0)
TOKENS = st.lists(st.integers(2, 4), min_size=1, max_size=4)


@given(
    st.lists(st.tuples(TOKENS, st.lists(st.integers(2, 4), max_size=3)), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_every_token_has_its_own_history(
    pairs: list[tuple[list[int], list[int]]], copies: int
) -> None:
    batch = group([prompt for prompt, _ in pairs], [answer for _, answer in pairs], copies)
    layout = shared_prefix.pack_shared(batch)
    assert len(layout.source) == layout.lengths.sum() <= batch.num_tokens
    laid, firsts = batch.tokens[layout.source], np.cumsum(layout.lengths) - layout.lengths
    starts = np.cumsum(batch.lengths) - batch.lengths
    assert (layout.position[np.flatnonzero(batch.mask) - 1] >= 0).all()
    for token in np.flatnonzero(layout.position >= 0):
        place = layout.position[token]
        piece = np.searchsorted(firsts, place, side="right") - 1
        parent = layout.prefixes[piece]
        before = (
            laid[firsts[parent] : firsts[parent] + layout.lengths[parent]]
            if parent >= 0
            else laid[:0]
        )
        start = starts[starts <= token].max()
        np.testing.assert_array_equal(
            np.concatenate([before, laid[firsts[piece] : place + 1]]),
            batch.tokens[start : token + 1],
        )


def test_a_shared_prompt_is_there_once() -> None:
    batch = group([[5, 6, 7], [8]], [[9], [9]], copies=4)
    layout = shared_prefix.pack_shared(batch)
    assert layout.lengths.tolist() == [3, 1, 2, 3, 1, 1, 2, 3]
    assert layout.prefixes.tolist() == [-1, 0, 0, 0, -1, 4, 4, 4]


def test_what_nobody_shares_stays_in_one_piece() -> None:
    batch = group([[5, 6], [5, 7]], [[9], [9]], copies=1)
    layout = shared_prefix.pack_shared(batch)
    assert layout.lengths.tolist() == [2, 2]
    assert layout.source.tolist() == [0, 1, 3, 4]


def test_what_predicts_nothing_is_left_out() -> None:
    """Behind the last token of the mask, that token itself, and a sequence without any."""
    pairs: list[Pair] = [(np.arange(6, dtype=np.int32), np.array(mask, np.bool_)) for mask in MASKS]
    layout = shared_prefix.pack_shared(pack_sft(pairs))
    assert layout.lengths.tolist() == [4, 3]
    assert layout.source.tolist() == [0, 1, 2, 3, 12, 13, 14]
    assert layout.position.tolist() == [0, 1, 2, 3, -1, -1, *[-1] * 6, 4, 5, 6, -1, -1, -1]


def test_bits_and_gradients_are_those_of_whole_sequences(
    new_trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 50, size).tolist() for size in (1, 20, 70)]
    batch = group(prompts, [[3], [4, 5], [6]], copies=5)
    batch = replace(
        batch,
        advantages=np.where(batch.mask, rng.normal(size=batch.num_tokens), 0).astype(np.float32),
    )
    trainer = new_trainer()
    scores = trainer.learner.score(batch)
    stats = trainer.train_step(batch, grpo_loss)
    monkeypatch.setattr("spmd_rl.train.shared_prefix.pack_shared", shared_prefix.pack_whole)
    other = new_trainer()
    np.testing.assert_array_equal(other.learner.score(batch).view(np.int32), scores.view(np.int32))
    expected = other.train_step(batch, grpo_loss)
    assert stats["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5)
    for name, weight in other.backend.local.items():
        np.testing.assert_allclose(trainer.backend.local[name].detach(), weight.detach(), atol=1e-6)

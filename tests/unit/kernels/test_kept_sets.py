"""Kept sets: their encoding, log-probs over them, and the GPU's kernels in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.kernels import sample_and_score, token_logprobs
from spmd_rl.kernels.vocab.filters import filter_scores_
from spmd_rl.kernels.vocab.kept_sets import KeptSets
from spmd_rl.kernels.vocab.kept_words import KeptRows, encode_words, pack_bits, unpack_bits
from spmd_rl.types.kept_sets import decode_sets, encode_sets, set_ends

NUM_ROWS, VOCAB = 5, 45
GREEDY = torch.arange(NUM_ROWS) % 2 == 0
SCALE = torch.tensor([1.0, 0.7, 1.0, 1.3, 1.0])
LARGE_VOCAB = 151936


def as_bits(sets: list[set[int]], vocab: int) -> Tensor:
    bits = torch.zeros(len(sets), vocab, dtype=torch.bool)
    for row, entries in enumerate(sets):
        bits[row, sorted(entries)] = True
    return bits


def encoded(sets: list[set[int]], vocab: int) -> list[bytes]:
    return encode_sets(as_bits(sets, vocab).numpy())


def joined(parts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(parts), np.uint8)


def sets_of(*, max_vocab: int) -> Any:
    return st.integers(1, max_vocab).flatmap(
        lambda vocab: st.tuples(
            st.lists(st.sets(st.integers(0, vocab - 1), max_size=30), max_size=8), st.just(vocab)
        )
    )


@given(sets_of(max_vocab=LARGE_VOCAB))
def test_sets_come_back_from_their_encoding(given_sets: tuple[list[set[int]], int]) -> None:
    sets, vocab = given_sets
    parts = encoded(sets, vocab)
    assert all(part.endswith(b"\0") and part.count(b"\0") == 1 for part in parts)
    counts, ids = decode_sets(joined(parts))
    assert counts.tolist() == [len(entries) for entries in sets]
    assert ids.tolist() == [one for entries in sets for one in sorted(entries)]
    assert set_ends(joined(parts)).tolist() == np.cumsum([len(part) for part in parts]).tolist()


@pytest.mark.parametrize("share", [0.0003, 0.01, 0.124, 0.126, 0.9, 1.0])
def test_a_large_set_takes_no_more_than_its_bitmap(share: float) -> None:
    rng = np.random.default_rng(0)
    kept = rng.permutation(LARGE_VOCAB) < share * LARGE_VOCAB
    (one,) = encode_sets(kept[None])
    ids = np.flatnonzero(kept)
    assert len(one) <= min(3 * len(ids), LARGE_VOCAB // 7 + 1) + 1
    assert decode_sets(np.frombuffer(one, np.uint8))[1].tolist() == ids.tolist()


@given(sets_of(max_vocab=200), st.data())
def test_words_of_any_tokens_are_their_sets(
    given_sets: tuple[list[set[int]], int], data: st.DataObject
) -> None:
    sets, vocab = given_sets
    ends = np.cumsum([len(part) for part in encoded(sets, vocab)])
    picked = sorted(data.draw(st.sets(st.sampled_from(range(len(sets)))))) if sets else []
    starts = np.concatenate([[0], ends])[picked].astype(np.int64)
    kept = KeptSets(
        torch.from_numpy(joined(encoded(sets, vocab)).copy()),
        torch.from_numpy(starts),
        torch.from_numpy(ends[picked].astype(np.int64)),
    )
    expected = as_bits([sets[row] or set(range(vocab)) for row in picked], vocab)
    words = kept.words(slice(None), vocab)
    assert torch.equal(unpack_bits(words, vocab), expected)
    assert torch.equal(words, pack_bits(expected))
    whole = [b"\0" if len(sets[row]) in (0, vocab) else encoded(sets, vocab)[row] for row in picked]
    assert encode_words(words.numpy(), vocab) == whole


@settings(max_examples=25)
@given(st.integers(0, 1 << 30))
def test_logprobs_over_a_set_and_their_gradient_against_float64(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(6, 50, generator=generator)).requires_grad_()
    bits = torch.rand(6, 50, generator=generator) < torch.linspace(0.05, 1.0, 6).unsqueeze(1)
    targets = torch.randint(50, (6,), generator=generator)
    bits[torch.arange(6), targets] = True
    scale, factor = torch.linspace(0.5, 2, 6), torch.randn(6, generator=generator)
    logprobs, entropy = token_logprobs(logits, targets, scale, pack_bits(bits))
    (logprobs * factor + entropy * factor.flip(0)).sum().backward()
    exact = logits.detach().double().requires_grad_()
    scores = (exact * scale.unsqueeze(1)).masked_fill(~bits, -torch.inf).log_softmax(1)
    expected = scores.gather(1, targets.unsqueeze(1)).squeeze(1)
    expected_entropy = -(scores.exp() * scores.masked_fill(~bits, 0.0)).sum(1)
    (expected * factor + expected_entropy * factor.flip(0)).sum().backward()
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)
    assert (logits.grad[~bits] == 0).all()
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)


def test_a_set_of_the_whole_vocabulary_changes_no_bit() -> None:
    logits, targets = torch.randn(9, 300), torch.arange(9)
    plain = token_logprobs(logits, targets, torch.ones(9))
    whole = token_logprobs(logits, targets, torch.ones(9), torch.full((9, 10), -1).int())
    assert all(map(torch.equal, plain, whole))


TOP_K = {"top_k": torch.tensor([1, 6, 7, 0, 3])}
TOP_P = {"top_p": torch.tensor([0.05, 0.9, 0.5, 1.0, 0.99])}
MIN_P = {"min_p": torch.tensor([0.0, 0.01, 1.0, 0.2, 0.05])}
FILTERS = {"top-k": TOP_K, "top-p": TOP_P, "min-p": MIN_P, "all": TOP_K | TOP_P | MIN_P}


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_a_draw_is_scored_over_what_the_filters_keep(filters: dict[str, Tensor]) -> None:
    logits = 2 * torch.randn(NUM_ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(NUM_ROWS)
    kept = KeptRows.empty(~GREEDY, VOCAB)
    arguments = (logits, SCALE, keys, keys)
    tokens, logprobs = sample_and_score(*arguments, greedy=GREEDY, kept=kept, **filters)
    plain, unmasked = sample_and_score(*arguments, greedy=GREEDY, **filters)
    assert torch.equal(tokens, plain)
    rest = [filters.get(name) for name in ("top_k", "top_p", "min_p")]
    scores = filter_scores_(logits * SCALE.unsqueeze(1), *rest)
    expected = torch.where(GREEDY.unsqueeze(1), logits, scores)
    assert torch.equal(logprobs, token_logprobs(expected, tokens, torch.ones(NUM_ROWS))[0])
    assert torch.equal(logprobs, token_logprobs(logits, tokens, SCALE, kept.words)[0])
    is_whole = unpack_bits(kept.words, VOCAB).all(1)
    assert is_whole[GREEDY].all()
    assert torch.equal(logprobs[is_whole], unmasked[is_whole])
    assert (logprobs[~is_whole] > unmasked[~is_whole]).all()

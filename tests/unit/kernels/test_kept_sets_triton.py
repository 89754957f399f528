"""GPU kernels for kept sets in Triton's interpreter, compared with numpy and torch on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import token_logprobs
from spmd_rl.kernels.vocab.filters import filter_scores_
from spmd_rl.kernels.vocab.kept_words import encode_words, pack_bits, unpack_bits
from spmd_rl.types.kept_sets import encode_sets

pytest.importorskip("triton")

from tests.unit.kernels.interpreted import Calls, results
from tests.unit.kernels.test_filter import MIN_P, SCALE, TOP_K, TOP_P, logits

VOCAB, ROWS = 300, 7
CAPACITY, TURN = 32, 3  # of kept_sets_calls; the third step is the second of two buffers
WIDE_VOCAB = 16500  # the last ids have three bytes


def sets(vocab: int) -> Tensor:
    """No entry, a few, the first and last, as many as fit, too many, and all."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.zeros(ROWS, vocab, dtype=torch.bool)
    bits[1, torch.randperm(vocab, generator=generator)[:9]] = True
    bits[2, [0, vocab - 1]] = True
    bits[3, torch.randperm(vocab, generator=generator)[:CAPACITY]] = True
    bits[4, torch.randperm(vocab, generator=generator)[: CAPACITY + 9]] = True
    bits[5] = True
    bits[6, 31:33] = True
    return bits


REPLAYS = torch.tensor([True, True, True, True, True, True, False])
FILTERED = (logits("normal"), SCALE, torch.arange(5) != 2, TOP_K, TOP_P, MIN_P)


def encodings(vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return data, starts and stops of the sets, of which the sixth is a bitmap."""
    parts = encode_sets(sets(vocab).numpy())
    ends = np.cumsum([len(part) for part in parts])
    starts = np.concatenate([[0], ends[:-1]])
    data = np.frombuffer(b"".join(parts), np.uint8).copy()
    return tuple(torch.from_numpy(array) for array in (data, starts, ends))  # type: ignore[return-value]


def scored() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.arange(ROWS) * 40
    bits = sets(VOCAB)
    bits[torch.arange(ROWS), targets] = True
    return (
        3 * torch.randn(ROWS, VOCAB, generator=generator),
        targets,
        torch.linspace(0.5, 2, ROWS),
        pack_bits(bits),
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    turn = torch.tensor([TURN])
    calls: dict[str, tuple[Any, ...]] = {
        "encode": ("encode", pack_bits(sets(VOCAB)), REPLAYS, VOCAB, turn),
        "encode wide": ("encode", pack_bits(sets(WIDE_VOCAB)), REPLAYS, WIDE_VOCAB, turn),
        "decode": ("decode", *encodings(VOCAB), VOCAB),
        "decode wide": ("decode", *encodings(WIDE_VOCAB), WIDE_VOCAB),
        "filter": ("filter", *FILTERED),
        "score": ("score", *scored()),
        "score all": ("score", *scored()[:3], torch.full_like(scored()[3], -1)),
        "score plainly": ("score", *scored()[:3], None),
    }
    run = Calls("tests.unit.kernels.kept_sets_calls", "call", {}, list(calls.values()))
    return dict(zip(calls, results(run, tmp_path_factory.mktemp("kept")), strict=True))


@pytest.mark.parametrize(("name", "vocab"), [("encode", VOCAB), ("encode wide", WIDE_VOCAB)])
def test_the_device_encodes_as_the_host(found: dict[str, Any], name: str, vocab: int) -> None:
    sizes, data, words = (tensor[TURN % 2] for tensor in found[name])
    expected = encode_words(pack_bits(sets(vocab)).numpy(), vocab)
    for row in (0, 1, 2, 3, 5):
        assert data[row, : sizes[row]].numpy().tobytes() == expected[row]
    assert sizes[4] == -1
    assert encode_words(words[4:5].numpy(), vocab) == [expected[4]]
    assert sizes[6:].tolist() == [0, 0]
    assert not any(tensor[0].any() for tensor in found[name])


@pytest.mark.parametrize(("name", "vocab"), [("decode", VOCAB), ("decode wide", WIDE_VOCAB)])
def test_the_device_decodes_as_the_host(found: dict[str, Any], name: str, vocab: int) -> None:
    bits = sets(vocab)
    bits[0] = True
    data, _, stops = encodings(vocab)
    assert data[stops[5] - 2] >= 128
    assert torch.equal(unpack_bits(found[name][0], vocab), bits)


def test_the_filters_write_what_they_keep(found: dict[str, Any]) -> None:
    values, scale, replays, *filters = FILTERED
    scores, words = found["filter"]
    expected = filter_scores_(values * scale.unsqueeze(1), *filters)
    assert torch.equal(scores, expected)
    kept = (expected != -torch.inf) | ~replays.unsqueeze(1)
    assert torch.equal(unpack_bits(words, values.shape[1]), kept)


def test_logprobs_over_a_set(found: dict[str, Any]) -> None:
    values, targets, scale, words = scored()
    values.requires_grad_()
    expected, entropy = token_logprobs(values, targets, scale, words)
    (expected + entropy).sum().backward()
    logprobs, own_entropy, gradient, in_place = found["score"]
    torch.testing.assert_close(logprobs, expected.detach())
    torch.testing.assert_close(own_entropy, entropy.detach())
    for own in (gradient, in_place):
        torch.testing.assert_close(own, values.grad)
        assert (own[~unpack_bits(words, VOCAB)] == 0).all()
    assert all(map(torch.equal, found["score all"], found["score plainly"]))

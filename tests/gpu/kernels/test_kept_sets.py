"""Kept sets on a GPU: filters, log-probs over sets, and their way to the host and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spmd_rl.kernels import head_logprobs, linear_fp32, sample_and_score, token_logprobs
from spmd_rl.kernels.runtime.cuda_graph import record
from spmd_rl.kernels.vocab.filter_triton import filtered
from spmd_rl.kernels.vocab.kept_sets import KeptSets, encoded_rows
from spmd_rl.kernels.vocab.kept_sets_triton import encode_rows
from spmd_rl.kernels.vocab.kept_words import (
    EncodedRows,
    KeptRows,
    encode_words,
    pack_bits,
    read_rows,
    unpack_bits,
)
from tests.gpu.kernels.gradients import gradient

VOCAB, NUM_ROWS = 151936, 64
DEVICE = torch.device("cuda")


def sets(vocab: int = VOCAB) -> Tensor:
    """Sets of every size from one entry to all, on the host."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.logspace(-5, 0, NUM_ROWS).unsqueeze(1)
    kept = torch.rand(NUM_ROWS, vocab, generator=generator) < shares
    kept[:, vocab // 2] = True
    kept[0] = False
    kept[0, [0, vocab - 1]] = True
    return kept


def words_of(kept: Tensor) -> Tensor:
    return pack_bits(kept).to(DEVICE)


FILTERS = ("top-k", "top-p", "min-p", "all")


def filters(rows: int) -> dict[str, dict[str, Tensor]]:
    one = torch.ones(rows, device=DEVICE)
    top_k, top_p, min_p = {"top_k": (one * 50).long()}, {"top_p": one * 0.95}, {"min_p": one * 0.05}
    return {"top-k": top_k, "top-p": top_p, "min-p": min_p, "all": top_k | top_p | min_p}


@pytest.mark.parametrize("vocab", [5003, VOCAB])
@pytest.mark.parametrize("with_replays", [True, False])
def test_the_host_reads_the_sets_of_the_device(vocab: int, with_replays: bool) -> None:
    words = pack_bits(sets(vocab))
    replays = torch.arange(NUM_ROWS) % 3 > 0 if not with_replays else torch.ones(NUM_ROWS).bool()
    kept = KeptRows(replays.to(DEVICE), words.to(DEVICE))
    out = EncodedRows.empty((2, NUM_ROWS + 3), vocab, None)
    encode_rows(kept, out, torch.tensor([7], device=DEVICE))
    torch.cuda.synchronize()
    expected = [
        one if replay else b""
        for one, replay in zip(encode_words(words.numpy(), vocab), replays.tolist(), strict=True)
    ]
    assert read_rows(out.step(1, NUM_ROWS)) == expected
    host = encoded_rows(kept, vocab).to_host()
    torch.cuda.synchronize()
    assert read_rows(host) == expected


@pytest.mark.parametrize("vocab", [5003, VOCAB])
def test_the_trainer_gets_the_words_of_the_engine(vocab: int) -> None:
    words = pack_bits(sets(vocab))
    parts = encode_words(words.numpy(), vocab)
    data = np.frombuffer(bytearray(b"".join(parts)), np.uint8)
    ends = np.cumsum([len(part) for part in parts])
    arrays = data, np.concatenate([[0], ends[:-1]]), ends
    kept = KeptSets(*(torch.from_numpy(array).to(DEVICE) for array in arrays))
    found = torch.cat([kept.words(slice(start, start + 7), vocab) for start in range(0, 64, 7)])
    assert torch.equal(unpack_bits(found.cpu(), vocab), sets(vocab))


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_a_draw_is_scored_over_what_the_filters_keep(name: str, spread: float, unequal) -> None:
    """From a graph too; the bits are those of logits that hold minus infinity elsewhere."""
    given, ids = filters(NUM_ROWS)[name], torch.arange(NUM_ROWS, device=DEVICE)
    logits = spread * torch.randn(NUM_ROWS, VOCAB, device=DEVICE)
    scale, greedy = torch.linspace(0.5, 2, NUM_ROWS, device=DEVICE), ids % 5 == 0
    scale[greedy] = 1.0
    kept = KeptRows.empty(~greedy & (ids % 7 > 0), VOCAB)
    rest: dict[str, Any] = {"greedy": greedy, **given}
    tokens, logprobs = sample_and_score(logits, scale, ids, ids, kept=kept, **rest)
    plain, unmasked = sample_and_score(logits, scale, ids, ids, **rest)
    assert torch.equal(tokens, plain)
    top_k, top_p, min_p = (given.get(one) for one in ("top_k", "top_p", "min_p"))
    scores = filtered(logits, scale, None, top_k, top_p, min_p)
    scores = torch.where(kept.replays.unsqueeze(1), scores, logits * scale.unsqueeze(1))
    assert torch.equal(unpack_bits(kept.words.cpu(), VOCAB).to(DEVICE), scores > -torch.inf)
    assert unequal(logprobs, token_logprobs(scores, tokens, torch.ones_like(scale))[0]) == 0
    assert unequal(logprobs, token_logprobs(logits, tokens, scale, kept.words)[0]) == 0
    assert unequal(logprobs[~kept.replays], unmasked[~kept.replays]) == 0
    assert (logprobs[kept.replays] > unmasked[kept.replays]).any()
    again = KeptRows.empty(kept.replays, VOCAB)
    graph, (drawn, scored) = record(
        lambda: sample_and_score(logits, scale, ids, ids, kept=again, **rest),
        torch.cuda.graph_pool_handle(),
    )
    graph.replay()
    assert torch.equal(drawn, tokens)
    assert unequal(scored, logprobs) == 0
    assert torch.equal(again.words, kept.words)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_a_head_over_sets_has_the_bits_and_gradients_of_its_parts(
    entropy_grad: bool, rows, unequal
) -> None:
    vocab, hidden = 5003, rows("normal", NUM_ROWS, 256)
    weight = rows("normal", vocab, 256) * 0.1
    bits = sets(vocab)
    targets = torch.full((NUM_ROWS,), vocab // 2, device=DEVICE)
    targets[0] = 0
    scale, push = torch.linspace(0.5, 2, NUM_ROWS, device=DEVICE), torch.randn(NUM_ROWS)
    parts = encode_words(pack_bits(bits).numpy(), vocab)
    ends = np.cumsum([len(part) for part in parts])
    arrays = (
        np.frombuffer(bytearray(b"".join(parts)), np.uint8),
        np.concatenate([[0], ends[:-1]]),
        ends,
    )
    kept = KeptSets(*(torch.from_numpy(array).to(DEVICE) for array in arrays))

    def gradients(hidden: Tensor, weight: Tensor, is_head: bool) -> tuple[Tensor, list[Tensor]]:
        hidden, weight = (one.detach().clone().requires_grad_() for one in (hidden, weight))
        if is_head:
            logprobs, entropy, _ = head_logprobs(
                hidden, weight, lambda part: linear_fp32(part, weight), targets, scale, 24,
                entropy_grad=entropy_grad, kept=kept,
            )  # fmt: skip
        else:
            logits = linear_fp32(hidden, weight)
            logprobs, entropy = token_logprobs(logits, targets, scale, words_of(bits))
        loss = logprobs + entropy if entropy_grad else logprobs
        (loss * push.to(DEVICE)).sum().backward()
        return logprobs.detach(), [gradient(leaf).double() for leaf in (hidden, weight)]

    own, found = gradients(hidden, weight, True)
    parts_own, _ = gradients(hidden, weight, False)
    assert unequal(own, parts_own) == 0
    _, expected = gradients(hidden.float(), weight.float(), False)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-2 * other.norm()
    exact = (hidden.double() @ weight.double().t() * scale.double().unsqueeze(1)).cpu()
    masked = exact.masked_fill(~bits, -torch.inf).log_softmax(1)
    expected_logprobs = masked.gather(1, targets.cpu().unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(own.cpu().double(), expected_logprobs, rtol=1e-4, atol=1e-3)

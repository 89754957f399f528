"""Gradients of log-probs, entropy and candidates on a GPU, against float64, and their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from spmd_rl.kernels import Scores, head_logprobs, linear_fp32, token_logprobs, token_scores
from spmd_rl.kernels.vocab.logprob import NUM_VOCAB_SHARDS, VOCAB_CHUNK
from spmd_rl.kernels.vocab.logprob_triton import logprob_forward
from tests.gpu.kernels.gradients import gradient

HIDDEN, LOGIT_ROWS, NUM_CANDIDATES, BLOCK = 256, 128, 20, 4096
SHAPES = [(151936, 300), (5003, 700), (7, 40)]
FIELDS = Scores._fields
MIXTURES = [FIELDS[:1], FIELDS[1:2], FIELDS[2:], FIELDS[:2], FIELDS]


class Inputs(NamedTuple):
    """A head with tokens to score, and the gradients of a loss towards the scores."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    candidates: Tensor
    inv_temperature: Tensor
    grads: Scores

    def head(self, *leaves: Tensor, asked: tuple[str, ...] = FIELDS) -> Scores:
        hidden, weight = leaves
        return head_logprobs(
            hidden,
            weight,
            lambda part: linear_fp32(part, weight),
            self.targets,
            self.inv_temperature,
            LOGIT_ROWS,
            entropy_grad="entropy" in asked,
            candidates=self.candidates if "candidate_logprobs" in asked else None,
        )

    def tokens(self, logits: Tensor) -> Scores:
        return token_scores(logits, self.targets, self.inv_temperature, self.candidates)

    def expected(self, logits: Tensor) -> Scores:
        every = (logits * self.inv_temperature.double().unsqueeze(1)).log_softmax(1)
        return Scores(
            every.gather(1, self.targets.unsqueeze(1)).squeeze(1),
            -(every.exp() * every).sum(1),
            every.gather(1, self.candidates),
        )

    def gradients(
        self, score: Callable[..., Scores], fields: tuple[str, ...], *leaves: Tensor
    ) -> list[Tensor]:
        mine = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        scores = score(*mine)
        outputs = [getattr(scores, field) for field in fields]
        pushes = [
            getattr(self.grads, field).to(out.dtype)
            for field, out in zip(fields, outputs, strict=True)
        ]
        torch.autograd.backward(outputs, pushes)
        return [gradient(leaf) for leaf in mine]


@pytest.fixture
def made(rows: Callable[..., Tensor]) -> Callable[[int, int], Inputs]:
    def make(vocab: int, num_rows: int) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(vocab)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", generator=generator)

        targets = torch.arange(num_rows, device="cuda") * 7 % vocab
        shape = num_rows, NUM_CANDIDATES
        candidates = torch.randint(vocab, shape, device="cuda", generator=generator)
        candidates[:, 3], candidates[:, 4] = targets, candidates[:, 0]
        return Inputs(
            rows("normal", num_rows, HIDDEN),
            rows("normal", vocab, HIDDEN) * 0.2,
            targets,
            candidates,
            torch.linspace(0.5, 2, num_rows, device="cuda"),
            Scores(normal(num_rows), normal(num_rows), normal(*shape)),
        )

    return make


def distance(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y).norm() / y.norm())


@pytest.mark.parametrize("fields", MIXTURES, ids="+".join)
@pytest.mark.parametrize(("vocab", "num_rows"), SHAPES)
def test_gradients_of_logits(vocab: int, num_rows: int, fields: tuple[str, ...], made) -> None:
    given = made(vocab, num_rows)
    logits = linear_fp32(given.hidden, given.weight)
    (found,) = given.gradients(given.tokens, fields, logits)
    (expected,) = given.gradients(given.expected, fields, logits.double())
    assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("fields", MIXTURES, ids="+".join)
@pytest.mark.parametrize(("vocab", "num_rows"), SHAPES)
def test_gradients_of_the_head(vocab: int, num_rows: int, fields: tuple[str, ...], made) -> None:
    given = made(vocab, num_rows)
    leaves = given.hidden, given.weight
    found = given.gradients(lambda *mine: given.head(*mine, asked=fields), fields, *leaves)
    wide = [leaf.double() for leaf in leaves]

    def expected(hidden: Tensor, weight: Tensor) -> Scores:
        return given.expected(hidden @ weight.t())

    for one, other in zip(found, given.gradients(expected, fields, *wide), strict=True):
        assert distance(one, other) < 8e-3
    if "entropy" in fields:  # the negative control
        wrong = given._replace(grads=given.grads._replace(entropy=-given.grads.entropy))
        for one, other in zip(found, wrong.gradients(expected, fields, *wide), strict=True):
            assert distance(one, other) > 0.05


@pytest.mark.parametrize(("vocab", "num_rows"), SHAPES)
def test_scores_of_the_head_have_the_bits_of_its_parts(
    vocab: int, num_rows: int, made, unequal
) -> None:
    given = made(vocab, num_rows)
    expected = given.tokens(linear_fp32(given.hidden, given.weight))
    with torch.no_grad():
        silent = given.head(given.hidden, given.weight)
    for scores in (given.head(given.hidden, given.weight), silent):
        for one, other in zip(scores, expected, strict=True):
            assert unequal(one, other) == 0
    plain = given.head(given.hidden, given.weight, asked=FIELDS[:1])
    assert unequal(plain.logprobs, expected.logprobs) == 0
    assert unequal(plain.entropy, expected.entropy) == 0
    assert unequal(expected.candidate_logprobs[:, 3], expected.logprobs) == 0


@triton.jit
def _gradient_before(
    grad, logits, targets, inv_temperature, row_max, row_sum, out, vocab, BLOCK: tl.constexpr
) -> None:
    """Store what the kernel without gradients of the entropy stored."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    scale = tl.load(inv_temperature + row)
    shifted = tl.load(logits + row * vocab + column, mask=inside, other=0.0) * scale - tl.load(
        row_max + row
    )
    hit = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    result = tl.load(grad + row) * scale * (hit - tl.exp(shifted) / tl.load(row_sum + row))
    tl.store(out + row * vocab + column, result.to(out.dtype.element_ty), mask=inside)


@pytest.mark.parametrize(("vocab", "num_rows"), SHAPES)
def test_the_gradient_of_log_probs_alone_keeps_its_bits(
    vocab: int, num_rows: int, made, unequal
) -> None:
    given = made(vocab, num_rows)
    logits = linear_fp32(given.hidden, given.weight)
    inputs = given.targets, given.inv_temperature
    *_, norms = logprob_forward(logits, *inputs, NUM_VOCAB_SHARDS, VOCAB_CHUNK)
    before, slopes = torch.empty_like(logits), torch.empty_like(logits, dtype=torch.bfloat16)
    grid = num_rows, triton.cdiv(vocab, BLOCK)
    for grad, out in ((given.grads.logprobs, before), (torch.ones_like(norms[0]), slopes)):
        _gradient_before[grid](
            grad, logits, *inputs, norms[0], norms[1], out, vocab, BLOCK, num_warps=8
        )
    (found,) = given.gradients(
        lambda x: Scores(*token_logprobs(x, *inputs), None), FIELDS[:1], logits
    )
    assert unequal(found, before) == 0
    factor = given.grads.logprobs.unsqueeze(1)
    expected = (slopes @ given.weight).mul_(factor), slopes.t() @ (given.hidden * factor).bfloat16()
    head = given.gradients(
        lambda *mine: given.head(*mine, asked=FIELDS[:1]), FIELDS[:1], given.hidden, given.weight
    )
    assert all(unequal(one, other) == 0 for one, other in zip(head, expected, strict=True))


@pytest.mark.parametrize("fields", [FIELDS[:2], FIELDS], ids="+".join)
def test_the_peak_is_that_of_log_probs_alone(fields: tuple[str, ...], made) -> None:
    """It does not grow by a tensor of [M, V]; an eighth of one is the bar."""
    vocab, num_rows = 151936, 2048
    given, peaks = made(vocab, num_rows), []
    for asked in (FIELDS[:1], fields, FIELDS[:1], fields):  # the first two warm up
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = given.gradients(
            lambda *mine, asked=asked: given.head(*mine, asked=asked),
            asked,
            given.hidden,
            given.weight,
        )
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del grads
    assert peaks[3] - peaks[2] < num_rows * vocab * 2 / 8


def test_a_second_backward_pass_is_refused(made) -> None:
    given = made(5003, 64)
    weight = given.weight.requires_grad_()
    scores = given.head(given.hidden, weight)
    scores.entropy.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.entropy.sum().backward()

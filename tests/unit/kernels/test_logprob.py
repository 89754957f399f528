"""Log-probs and entropy have the gradients of float64, and the bits that they always had."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.kernels import Scores, candidate_logprobs, token_logprobs, token_scores
from spmd_rl.kernels.vocab.logprob import _sum_exp

ANY = settings(max_examples=60, deadline=None)
VOCABULARIES = st.one_of(st.integers(1, 70), st.sampled_from([1023, 1025, 8191, 8200, 9001]))


class Case:
    """Logits with tokens to score, and the gradients of a loss towards the scores."""

    def __init__(self, num_rows: int, vocab: int, scale: float, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(num_rows * 10007 + vocab)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        def tokens(*shape: int) -> Tensor:
            return torch.randint(vocab, shape, generator=generator)

        self.logits = scale * normal(num_rows, vocab)
        self.targets, self.candidates = tokens(num_rows), tokens(num_rows, 5)
        self.candidates[:, 3], self.candidates[:, 4] = self.targets, self.candidates[:, 0]
        self.inv_temperature = 1 / (0.3 + torch.rand(num_rows, generator=generator, dtype=dtype))
        self.grads = Scores(normal(num_rows), normal(num_rows), normal(num_rows, 5))

    def doubled(self) -> Case:
        """Return the same numbers in float64."""
        other = object.__new__(Case)
        other.targets, other.candidates = self.targets, self.candidates
        other.logits, other.inv_temperature = self.logits.double(), self.inv_temperature.double()
        other.grads = Scores(*(grad.double() for grad in self.grads))
        return other

    def scores(self, logits: Tensor) -> Scores:
        return token_scores(logits, self.targets, self.inv_temperature, self.candidates)

    def expected(self, logits: Tensor) -> Scores:
        """Return the scores by torch's log-softmax."""
        every = (logits * self.inv_temperature.unsqueeze(1)).log_softmax(1)
        return Scores(
            every.gather(1, self.targets.unsqueeze(1)).squeeze(1),
            -(every.exp() * every).sum(1),
            every.gather(1, self.candidates),
        )

    def gradient(self, scores: object, *fields: str) -> Tensor:
        """Return the gradient towards the logits of a loss that reads these fields."""
        leaf = self.logits.clone().requires_grad_()
        found = scores(leaf)  # type: ignore[operator]
        outputs = [getattr(found, field) for field in fields]
        torch.autograd.backward(outputs, [getattr(self.grads, field) for field in fields])
        assert leaf.grad is not None
        return leaf.grad


def distance(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y).norm() / y.norm().clamp(min=1e-30))


def logprobs_before(
    logits: Tensor, targets: Tensor, inv_temperature: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-prob, entropy and gradient by the formulas of the op without entropy gradients."""
    shifted = logits * inv_temperature.unsqueeze(1)
    shifted -= shifted.amax(dim=1, keepdim=True)
    terms = shifted.exp()
    total = _sum_exp(terms)
    log_total = total.log()
    logprob = shifted.gather(1, targets.unsqueeze(1)).squeeze(1) - log_total
    probs = terms.div_(total.unsqueeze(1))
    entropy = log_total - shifted.mul_(probs).sum(-1)
    scale = (grad * inv_temperature).unsqueeze(1)
    towards_logits = probs * -scale
    towards_logits.scatter_add_(1, targets.unsqueeze(1), scale)
    return logprob, entropy, towards_logits


FIELDS = ["logprobs", "entropy", "candidate_logprobs"]
MIXTURES = [[one] for one in FIELDS] + [FIELDS[:2], FIELDS[::2], FIELDS[1:], FIELDS]


@ANY
@given(
    num_rows=st.integers(1, 9),
    vocab=VOCABULARIES,
    scale=st.sampled_from([0.01, 1.0, 8.0]),
    fields=st.sampled_from(MIXTURES),
)
def test_scores_and_gradients_are_those_of_log_softmax(
    num_rows: int, vocab: int, scale: float, fields: list[str]
) -> None:
    case = Case(num_rows, vocab, scale, torch.float64)
    for found, expected in zip(case.scores(case.logits), case.expected(case.logits), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    found, expected = (case.gradient(scores, *fields) for scores in (case.scores, case.expected))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@ANY
@given(num_rows=st.integers(1, 9), vocab=VOCABULARIES, fields=st.sampled_from(MIXTURES))
def test_gradients_in_float32_are_close_to_float64(
    num_rows: int, vocab: int, fields: list[str]
) -> None:
    case = Case(num_rows, max(vocab, 2), 1.0, torch.float32)
    wide = case.doubled()
    expected = wide.gradient(wide.expected, *fields)
    assert distance(case.gradient(case.scores, *fields), expected) < 2e-6


def test_gradcheck() -> None:
    case = Case(4, 19, 2.0, torch.float64)
    assert torch.autograd.gradcheck(case.scores, case.logits.requires_grad_())


@ANY
@given(num_rows=st.integers(1, 9), vocab=VOCABULARIES, scale=st.sampled_from([1.0, 8.0, 300.0]))
def test_a_gradient_of_the_entropy_adds_up_to_zero(num_rows: int, vocab: int, scale: float) -> None:
    """A constant added to all logits does not change the entropy."""
    case = Case(num_rows, vocab, scale, torch.float64)
    gradient = case.gradient(case.scores, "entropy")
    assert gradient.isfinite().all()
    assert gradient.sum(1).abs().max() < 1e-11


@ANY
@given(num_rows=st.integers(1, 9), vocab=VOCABULARIES)
def test_without_a_gradient_of_the_entropy_no_bit_changes(num_rows: int, vocab: int) -> None:
    case = Case(num_rows, vocab, 3.0, torch.float32)
    inputs = case.targets, case.inv_temperature
    *before, gradient = logprobs_before(case.logits, *inputs, case.grads.logprobs)
    found = token_logprobs(case.logits, *inputs)
    assert all(map(torch.equal, found, before))
    assert all(map(torch.equal, case.scores(case.logits), before))
    assert torch.equal(case.gradient(case.scores, "logprobs"), gradient)
    with torch.no_grad():
        assert all(map(torch.equal, token_logprobs(case.logits, *inputs), before))


def test_candidates_have_the_bits_of_chosen_tokens() -> None:
    case = Case(7, 300, 3.0, torch.float32)
    found = candidate_logprobs(case.logits, case.candidates, case.inv_temperature)
    assert torch.equal(found, case.scores(case.logits).candidate_logprobs)
    for place in range(5):
        targets = case.candidates[:, place]
        alone = token_logprobs(case.logits, targets, case.inv_temperature)[0]
        assert torch.equal(found[:, place], alone)


def test_control_a_flipped_sign_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case, negative = Case(5, 40, 1.0, torch.float64), torch.special.entr
    expected = case.gradient(case.expected, *FIELDS)
    assert distance(case.gradient(case.scores, *FIELDS), expected) < 1e-12
    monkeypatch.setattr(torch.special, "entr", lambda probs: -negative(probs))
    assert distance(case.gradient(case.scores, *FIELDS), expected) > 0.1

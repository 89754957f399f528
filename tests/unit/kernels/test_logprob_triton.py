"""GPU kernels of log-probs and entropy in Triton's interpreter, compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.unit.kernels.interpreted import Calls, results
from tests.unit.kernels.test_logprob import FIELDS, MIXTURES, Case, distance

MODULE = "tests.unit.kernels.logprob_calls"
VOCABULARIES = [45, 1030]
NUM_ROWS, HIDDEN, LOGIT_ROWS = 5, 16, 2
DTYPES = [torch.float16, torch.float32]
TOLERANCE = {torch.float16: 2e-3, torch.float32: 1e-6}
Interpreted = Callable[[str, list[tuple[Any, ...]]], list[Any]]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Interpreted:
    """Return a function that calls one of MODULE in the interpreter, in one process."""

    def call(function: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        return results(Calls(MODULE, function, {}, arguments), tmp_path_factory.mktemp(function))

    return call


def upstream(case: Case, fields: list[str]) -> tuple[Tensor | None, ...]:
    return tuple(getattr(case.grads, field) if field in fields else None for field in FIELDS)


def candidates(case: Case, fields: list[str]) -> Tensor | None:
    return case.candidates if "candidate_logprobs" in fields else None


def test_gradients_of_logits_are_those_of_float64(interpreted: Interpreted) -> None:
    cases = [
        (Case(3, vocab, 2.0, torch.float32), fields)
        for vocab in VOCABULARIES
        for fields in MIXTURES
    ]
    found = interpreted(
        "token",
        [
            (
                case.logits,
                case.targets,
                case.inv_temperature,
                candidates(case, fields),
                upstream(case, fields),
            )
            for case, fields in cases
        ],
    )
    for (case, fields), (*scores, gradient) in zip(cases, found, strict=True):
        wide = case.doubled()
        for one, expected in zip(scores, wide.expected(wide.logits), strict=True):
            assert one is None or distance(one, expected) < 1e-6
        expected = wide.gradient(wide.expected, *fields)
        assert distance(gradient, expected) < 2e-6
        flipped = wide.grads._replace(entropy=-wide.grads.entropy)
        if "entropy" in fields:  # the negative control
            wide.grads = flipped
            assert distance(gradient, wide.gradient(wide.expected, *fields)) > 0.01


def test_candidates_have_the_bits_of_chosen_tokens(interpreted: Interpreted) -> None:
    case = Case(4, 1030, 2.0, torch.float32)
    grads = upstream(case, FIELDS)
    found = interpreted(
        "token",
        [
            (case.logits, targets.contiguous(), case.inv_temperature, case.candidates, grads)
            for targets in case.candidates.t()
        ],
    )
    for place, (logprobs, _, of_candidates, _) in enumerate(found):
        assert torch.equal(logprobs, of_candidates[:, place])


class Head(NamedTuple):
    """A head whose logits are those of `case`, up to rounding."""

    case: Case
    hidden: Tensor
    weight: Tensor

    def arguments(self, fields: list[str]) -> tuple[Any, ...]:
        case = self.case
        inputs = case.targets, case.inv_temperature, candidates(case, fields)
        return self.hidden, self.weight, *inputs, upstream(case, fields), LOGIT_ROWS

    def expected(self, fields: list[str]) -> list[Tensor]:
        """Return the gradients of the hidden states and of the weight in float64."""
        wide = self.case.doubled()
        wide.logits = self.hidden.double() @ self.weight.double().t()
        slopes = wide.gradient(wide.expected, *fields)
        return [slopes @ self.weight.double(), slopes.t() @ self.hidden.double()]


def made_head(vocab: int, dtype: torch.dtype) -> Head:
    generator = torch.Generator().manual_seed(vocab)
    hidden, weight = (
        torch.randn(rows, HIDDEN, generator=generator).to(dtype) for rows in (NUM_ROWS, vocab)
    )
    return Head(Case(NUM_ROWS, vocab, 1.0, torch.float32), hidden, weight)


@pytest.fixture(scope="module")
def heads(interpreted: Interpreted) -> list[tuple[Head, list[str], Any]]:
    """Heads, the fields that have gradients, and what is found of each."""
    cases = [(made_head(77, dtype), fields) for dtype in DTYPES for fields in MIXTURES]
    found = interpreted("head", [head.arguments(fields) for head, fields in cases])
    return [(*case, of_case) for case, of_case in zip(cases, found, strict=True)]


def test_gradients_of_a_head_are_those_of_float64(heads: list[tuple[Head, list[str], Any]]) -> None:
    for head, fields, (*_, grad_hidden, grad_weight) in heads:
        for one, expected in zip((grad_hidden, grad_weight), head.expected(fields), strict=True):
            assert distance(one, expected) < TOLERANCE[head.weight.dtype]


def test_gradients_of_parts_of_a_head_add_up(interpreted: Interpreted) -> None:
    """Ranks have some rows each, and the same scores."""
    ends = [(0, 30), (30, 77)]
    cases = [(made_head(77, torch.float32), fields) for fields in (FIELDS[::2], FIELDS)]
    calls = [(*head.arguments(fields), *part) for head, fields in cases for part in ends]
    found = interpreted("head", calls)
    for (head, fields), first, second in zip(cases, found[::2], found[1::2], strict=True):
        for one, other in zip(first[:3], second[:3], strict=True):
            assert one is None or torch.equal(one, other)
        of_hidden, of_weight = head.expected(fields)
        assert distance(first[3] + second[3], of_hidden) < 1e-6
        assert distance(torch.cat([first[4], second[4]]), of_weight) < 1e-6


def test_recomputed_logits_give_a_head_other_gradients_in_half_precision(
    interpreted: Interpreted,
) -> None:
    """So a trainer that recomputes all has another norm of gradients than one that keeps slopes.

    Slopes are rounded before the loss scales them, gradients of recomputed logits after that.
    """
    head, fields = made_head(77, torch.float16), FIELDS[:1]
    case, whole = head.case, head.weight.float().t()
    logits = torch.cat([rows.float() @ whole for rows in head.hidden.split(LOGIT_ROWS)])
    inputs = case.targets, case.inv_temperature, None, upstream(case, fields)
    ((logprobs, _, _, of_logits),) = interpreted("token", [(logits, *inputs)])
    ((kept_logprobs, _, _, *kept),) = interpreted("head", [head.arguments(fields)])
    assert torch.equal(kept_logprobs, logprobs)
    of_logits = of_logits.half()
    again = of_logits @ head.weight, of_logits.t() @ head.hidden
    for one, other in zip(kept, again, strict=True):
        assert 1e-4 < distance(one, other.double()) < TOLERANCE[torch.float16]


def test_scores_of_a_head_do_not_depend_on_their_gradients(
    heads: list[tuple[Head, list[str], Any]],
) -> None:
    found = [scores for head, _, scores in heads if head.weight.dtype == torch.float32]
    assert len(found) == len(MIXTURES)
    for scores in found:
        assert torch.equal(scores[0], found[0][0])
        assert torch.equal(scores[1], found[0][1])


def test_a_second_backward_pass_of_a_head_is_refused(interpreted: Interpreted) -> None:
    head = made_head(20, torch.float32)
    inputs = head.hidden, head.weight, head.case.targets, head.case.inv_temperature
    (said,) = interpreted("head_twice", [inputs])
    assert "modified by an inplace operation" in said

"""Distillation against torch's KL over the whole vocabulary, with broken variants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from spmd_rl.algo.distill import (
    distill_credit,
    distill_gains,
    distill_metrics,
    topk_kl_loss,
    with_candidates,
)
from spmd_rl.algo.losses import LossInput, grpo_loss
from spmd_rl.algo.packing import pack_sft
from spmd_rl.errors import ConfigError, ContractError
from spmd_rl.types.token_values import TokenValues

VOCAB = 7


def logits() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    student, teacher = 2 * torch.randn(2, 5, VOCAB, generator=rng, dtype=torch.float64)
    return student.requires_grad_(), teacher


def loss_input(candidates: Tensor, teacher: Tensor) -> LossInput:
    zeros = torch.zeros(len(candidates), dtype=torch.float64)
    return LossInput(
        *[zeros] * 5,
        sequence=torch.zeros(len(candidates), dtype=torch.int64),
        columns={"candidate_teacher_logprobs": teacher},
        candidate_logprobs=candidates,
    )


def topk(student: Tensor, teacher: Tensor, k: int, direction: Any) -> Tensor:
    teacher_logprobs, ids = teacher.log_softmax(-1).topk(k)
    out = loss_input(student.log_softmax(-1).gather(1, ids), teacher_logprobs)
    return topk_kl_loss(out, direction=direction)[0]


def whole_kl(student: Tensor, teacher: Tensor, direction: str) -> Tensor:
    """torch's own, over the whole vocabulary: kl_div(input, target) is KL(target || input)."""
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    pair = (log_s, log_t) if direction == "forward" else (log_t, log_s)
    return kl_div(*pair, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_with_all_tokens_it_is_torchs_divergence(direction: str) -> None:
    student, teacher = logits()
    found = topk(student, teacher, VOCAB, direction)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    expected = whole_kl(student, teacher, direction)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-9, rtol=0)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_rest_of_the_vocabulary_is_one_outcome(direction: str, k: int) -> None:
    """By hand on K + 1 outcomes; and it bounds the whole divergence from below."""
    student, teacher = logits()
    found = topk(student, teacher, k, direction)
    ids = teacher.topk(k).indices.tolist()
    for row, kept in enumerate(ids):
        s, t = student[row].softmax(-1).tolist(), teacher[row].softmax(-1).tolist()
        rest = [i for i in range(VOCAB) if i not in kept]
        s, t = ([p[i] for i in kept] + [sum(p[i] for i in rest)] for p in (s, t))
        p, q = (t, s) if direction == "forward" else (s, t)
        by_hand = sum(a * np.log(a / b) for a, b in zip(p, q, strict=True))
        assert found[row].item() == pytest.approx(by_hand, abs=1e-9)
    assert (found <= whole_kl(student, teacher, direction) + 1e-12).all()
    # the opposite direction, and a student that is the teacher, are told apart
    other = {"forward": "reverse", "reverse": "forward"}[direction]
    assert (found - topk(student, teacher, k, other)).abs().max() > 1e-3
    assert topk(teacher, teacher, k, direction).abs().max() < 1e-12


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("sign", [1, -1])
def test_only_the_right_sign_leads_to_the_teacher(direction: str, sign: int) -> None:
    student, teacher = logits()
    student = student.detach().clone()
    before = whole_kl(student, teacher, "reverse").mean()
    for _ in range(300):
        student.requires_grad_()
        (gradient,) = torch.autograd.grad(
            sign * topk(student, teacher, 4, direction).sum(), student
        )
        student = (student - 0.3 * gradient).detach()
    after = whole_kl(student, teacher, "reverse").mean()
    assert (after < before / 4) == (sign == 1)


def batch() -> Any:
    packed = pack_sft([(np.arange(4, dtype=np.int32), np.arange(4) > 1)] * 2)
    student = np.where(packed.mask, np.linspace(-2, -1, 8), 0).astype(np.float32)
    teacher = np.where(packed.mask, np.linspace(-1, -3, 8), 0).astype(np.float32)
    return replace(packed, rollout_logprobs=student).with_columns(teacher_logprobs=teacher)


def test_the_advantage_is_the_teachers_gain() -> None:
    found = distill_credit(batch(), coef=2.0)
    expected = -2.0 * (found.rollout_logprobs - found.columns["teacher_logprobs"])
    np.testing.assert_allclose(found.advantages, expected, atol=1e-6)
    assert not found.advantages[~found.mask].any()
    rewarded = replace(batch(), advantages=found.mask.astype(np.float32))
    np.testing.assert_allclose(
        distill_credit(rewarded).advantages[found.mask], 1 + expected[found.mask] / 2, atol=1e-6
    )
    kl = (found.rollout_logprobs - found.columns["teacher_logprobs"])[found.mask].mean()
    assert distill_metrics(found)["distill/kl"] == pytest.approx(kl)
    assert distill_gains(found) == pytest.approx(expected.reshape(2, 4)[:, 2:].mean(1) / 2)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_sampled_gradient_is_that_of_the_divergence(sign: int) -> None:
    """In expectation over the student's own tokens, on policy: d KL(student || teacher)."""
    student, teacher = logits()
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    expected = torch.zeros_like(student)
    zeros = torch.zeros(len(student), dtype=torch.float64)
    for token in range(VOCAB):
        lp = log_s[:, token]
        gain = sign * (log_t[:, token] - lp.detach())
        out = LossInput(lp, lp.detach(), lp.detach(), gain, zeros, sequence=zeros.long())
        weighted = (lp.detach().exp() * grpo_loss(out)[0]).sum()
        expected += torch.autograd.grad(weighted, student, retain_graph=True)[0]
    (gradient,) = torch.autograd.grad(whole_kl(student, teacher, "reverse").sum(), student)
    assert torch.allclose(expected, gradient, atol=1e-9) == (sign == 1)


def test_what_is_missing_is_named() -> None:
    plain = replace(batch(), columns={})
    for call in (distill_credit, distill_metrics):
        with pytest.raises(ContractError, match="no column 'teacher_logprobs'"):
            call(plain)
    ids = np.full((8, 2), 5, np.int32)
    rows = plain.lengths, plain.index
    candidates = TokenValues(ids, *rows), TokenValues(np.zeros((8, 2), np.float32), *rows)
    columns = with_candidates(plain, *candidates).columns
    assert columns.keys() == {"candidates", "candidate_teacher_logprobs"}
    out = loss_input(torch.zeros(3, 2), torch.zeros(3, 2))
    for missing in (replace(out, candidate_logprobs=None), replace(out, columns={})):
        with pytest.raises(ContractError, match="log-probs of candidates"):
            topk_kl_loss(missing)
    with pytest.raises(ConfigError, match="direction"):
        topk_kl_loss(out, direction="both")  # type: ignore[arg-type]

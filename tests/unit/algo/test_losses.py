from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.algo.losses import LossInput, checked, grpo_loss, sft_loss
from spmd_rl.errors import ContractError


def _inputs(
    logprobs: list[float],
    old_logprobs: list[float],
    advantages: list[float],
    rollout_logprobs: list[float] | None = None,
) -> LossInput:
    def tensor(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return LossInput(
        logprobs=tensor(logprobs).requires_grad_(),
        old_logprobs=tensor(old_logprobs),
        rollout_logprobs=tensor(rollout_logprobs if rollout_logprobs is not None else old_logprobs),
        advantages=tensor(advantages),
        entropy=tensor([0.0] * len(logprobs)),
        sequence=torch.zeros(len(logprobs), dtype=torch.int64),
    )


def test_by_hand() -> None:
    # Ratios 1.5, 0.5, 1.1 with A = 1, -1, 2: the first is clipped at 1.2 and the second at 0.8.
    out = _inputs([np.log(1.5), np.log(0.5), np.log(1.1)], [0.0, 0.0, 0.0], [1.0, -1.0, 2.0])
    loss, measured = grpo_loss(out)
    np.testing.assert_allclose(loss.detach(), [-1.2, 0.8, -2.2], rtol=1e-12)
    assert measured["train/clip_frac"].tolist() == [1.0, 1.0, 0.0]
    loss.sum().backward()
    np.testing.assert_allclose(out.logprobs.grad, [0.0, 0.0, -2.2], atol=1e-12)


def test_clip_higher_moves_the_upper_bound_alone() -> None:
    out = _inputs([np.log(1.25), np.log(0.75)], [0.0, 0.0], [1.0, -1.0])
    np.testing.assert_allclose(grpo_loss(out)[0].detach(), [-1.2, 0.8], rtol=1e-12)
    np.testing.assert_allclose(grpo_loss(out, clip_high=0.28)[0].detach(), [-1.25, 0.8], rtol=1e-12)


def test_a_bad_direction_is_never_clipped_away() -> None:
    # A > 0 with a small ratio, A < 0 with a large one: the gradient must live.
    out = _inputs([np.log(0.5), np.log(1.5)], [0.0, 0.0], [1.0, -1.0])
    loss, measured = grpo_loss(out)
    np.testing.assert_allclose(loss.detach(), [-0.5, 1.5], rtol=1e-12)
    assert measured["train/clip_frac"].sum() == 0


TOKENS = st.lists(st.tuples(*(st.floats(-6, 0),) * 3, st.floats(-3, 3)), min_size=1, max_size=8)


@given(TOKENS, st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_against_numpy_in_float64(tokens: list[tuple[float, ...]], low: float, high: float) -> None:
    lp, old, roll, advantages = (np.array(column) for column in zip(*tokens, strict=True))
    out = _inputs(lp.tolist(), old.tolist(), advantages.tolist(), roll.tolist())

    def clipped(ratio: np.ndarray) -> np.ndarray:
        return np.maximum(-ratio * advantages, -np.clip(ratio, 1 - low, 1 + high) * advantages)

    knobs = {"clip_low": low, "clip_high": high}
    ratio, engine_ratio = np.exp(lp - old), np.exp(lp - roll)
    np.testing.assert_allclose(grpo_loss(out, **knobs)[0].detach(), clipped(ratio), rtol=1e-12)
    np.testing.assert_allclose(
        grpo_loss(out, **knobs, behaviour="rollout")[0].detach(), clipped(engine_ratio), rtol=1e-12
    )
    weight = np.minimum(np.exp(old - roll), 2.0)
    np.testing.assert_allclose(
        grpo_loss(out, **knobs, tis_cap=2.0)[0].detach(), weight * clipped(ratio), rtol=1e-12
    )


def test_correcting_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        grpo_loss(_inputs([0.0], [0.0], [1.0]), behaviour="rollout", tis_cap=2.0)


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    out = _inputs([-1.0, -2.0], [-1.0, -2.0], [0.5, -3.0])
    grpo_loss(out)[0].sum().backward()
    np.testing.assert_allclose(out.logprobs.grad, [-0.5, 3.0], rtol=1e-12)


def test_sft_is_cross_entropy() -> None:
    loss, measured = sft_loss(_inputs([-1.5, -0.25], [0.0, 0.0], [0.0, 0.0]))
    assert loss.tolist() == [1.5, 0.25]
    assert measured == {}


def test_losses_take_an_empty_micro_batch() -> None:
    for loss in (grpo_loss, sft_loss):
        assert loss(_inputs([], [], []))[0].shape == (0,)


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (
            lambda out: (out.logprobs.sum(), {}),
            r"the loss as the shape \[\]: expected \[2\], a value for each token",
        ),
        (
            lambda out: (out.logprobs.mean(0, keepdim=True), {}),
            r"the loss as the shape \[1\]: expected \[2\]",
        ),
        (
            lambda out: (out.logprobs, {"mine": out.logprobs.mean()}),
            r"mine as the shape \[\]: expected \[2\]",
        ),
        (lambda out: (out.logprobs, {"mine": 0.5}), r"mine as a float: expected \[2\]"),
        (
            lambda out: out.logprobs,
            "returned a Tensor: expected two things, the loss of each token and a dict",
        ),
        (lambda out: (out.logprobs, out.logprobs), "returned a tuple: expected two things"),
        (
            lambda out: (out.logprobs, {"ratio": out.logprobs}),
            "measures 'ratio', which the trainer has: choose another name",
        ),
        (lambda out: (out.logprobs, {"train/loss": out.logprobs}), "measures 'train/loss'"),
        (lambda out: (out.logprobs, {"onpolicy/k1": out.logprobs}), "measures 'onpolicy/k1'"),
    ],
)
def test_a_loss_that_is_not_one_value_a_token_is_refused(loss: Any, problem: str) -> None:
    out = _inputs([-1.0, -2.0], [-1.0, -2.0], [1.0, 1.0])
    with pytest.raises(ContractError, match=problem):
        checked(loss(out), out, loss)


def test_losses_of_ours_are_not_refused() -> None:
    for num in (0, 1, 3):
        out = _inputs([-1.0] * num, [-1.0] * num, [1.0] * num)
        for loss in (grpo_loss, sft_loss):
            assert checked(loss(out), out, loss)[0].shape == (num,)


def test_a_refused_loss_is_named_through_partial() -> None:
    out = _inputs([-1.0, -2.0], [-1.0, -2.0], [1.0, 1.0])
    with pytest.raises(ContractError, match="^grpo_loss returned"):
        checked(None, out, partial(grpo_loss, clip_low=0.1))

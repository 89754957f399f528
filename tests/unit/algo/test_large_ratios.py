"""Ratios that float32 cannot hold: the gradient is finite where the loss is, as in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spmd_rl.algo.losses import LossInput, grpo_loss
from spmd_rl.algo.policy.policy_loss import policy_loss

LOG_RATIOS = [88.0, 88.7, 88.8, 100.0, 400.0, 0.0]  # exp of 88.73 and more overflows in float32


def _loss_and_gradient(
    loss: Callable[..., Any], dtype: torch.dtype, advantages: list[float], **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each log ratio, one a sequence, and the gradient of their sum."""
    old = torch.tensor([-500.0] * len(LOG_RATIOS), dtype=dtype)
    logprobs = (old + torch.tensor(LOG_RATIOS, dtype=dtype)).requires_grad_()
    out = LossInput(
        logprobs=logprobs,
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.tensor(advantages, dtype=dtype),
        entropy=torch.zeros_like(old),
        sequence=torch.arange(len(old)),
        num_sequences=len(old),
    )
    per_token, _ = loss(out, **settings)
    per_token.sum().backward()
    assert logprobs.grad is not None
    return per_token.detach().double(), logprobs.grad.double()


@pytest.mark.parametrize(
    ("loss", "advantage", "settings"),
    [
        (grpo_loss, 1.0, {}),
        (policy_loss, 1.0, {}),
        (policy_loss, 0.5, {"behaviour": "rollout", "clip_high": 0.28}),
        (policy_loss, -1.0, {"dual_clip": 3.0}),
        (policy_loss, 1.0, {"surrogate": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}),
        (policy_loss, -1.0, {"surrogate": "gspo", "dual_clip": 3.0}),
        (policy_loss, 1.0, {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0}),
        (policy_loss, -1.0, {"opsm_delta": -1000.0}),  # which leaves every token out
    ],
)
def test_the_gradient_is_that_of_float64(
    loss: Callable[..., Any], advantage: float, settings: dict[str, Any]
) -> None:
    advantages = [advantage] * len(LOG_RATIOS)
    values, gradient = _loss_and_gradient(loss, torch.float32, advantages, **settings)
    expected, expected_gradient = _loss_and_gradient(loss, torch.float64, advantages, **settings)
    assert expected.isfinite().all()
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=0)


def test_a_loss_that_overflows_stays_infinite() -> None:
    """The trainer refuses such a step; a loss within bounds would hide it."""
    values, gradient = _loss_and_gradient(policy_loss, torch.float32, [-1.0] * len(LOG_RATIOS))
    assert values.isinf().tolist() == [False, False, True, True, True, False]
    assert not gradient.isnan().any()

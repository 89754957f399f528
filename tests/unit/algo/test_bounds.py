"""Values at and beyond the bounds of corrections, KL estimates and OPSM, and what flows there."""

from __future__ import annotations

import pytest
import torch

from spmd_rl.algo.losses import LossInput
from spmd_rl.algo.policy.corrections import correction_weights, level_ratio, outside, vetoed
from spmd_rl.algo.policy.kl import kl_estimate
from spmd_rl.algo.policy.opsm import opsm_masked
from spmd_rl.algo.policy.policy_loss import policy_loss

RATIOS = torch.tensor([0.49, 0.5, 1.0, 2.0, 2.01], dtype=torch.float64)


def _input(
    logprobs: list[float], old: list[float], rollout: list[float], advantages: list[float]
) -> LossInput:
    """Return the input of a loss for tokens that are one sequence. Log-probs carry gradients."""

    def leaf(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, requires_grad=True)

    return LossInput(
        logprobs=leaf(logprobs),
        old_logprobs=leaf(old),
        rollout_logprobs=leaf(rollout),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        entropy=torch.zeros(len(logprobs), dtype=torch.float64),
        sequence=torch.zeros(len(logprobs), dtype=torch.int64),
    )


def test_a_ratio_at_a_bound_is_within() -> None:
    masked = correction_weights(RATIOS, "mask", high=2.0)
    assert masked.tolist() == [0.0, 0.5, 1.0, 2.0, 0.0]
    assert correction_weights(RATIOS, "mask", high=2.0, low=0.49).tolist()[0] == 0.49
    assert outside(RATIOS, high=2.0).tolist() == [True, False, False, False, True]
    one = torch.zeros(5, dtype=torch.int64)
    assert not vetoed(RATIOS, 0.49, one, 1).any()
    assert vetoed(RATIOS, 0.491, one, 1).all()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_weights_are_constants(mode: str, level: str) -> None:
    """A weight multiplies the gradient of the log-probs, and has none of its own."""
    out = _input([-1.0, -1.1], [-1.0, -1.0], [-1.1, -1.05], [1.0, 2.0])
    loss, _ = policy_loss(out, correction=mode, correction_level=level)  # type: ignore[arg-type]
    loss.sum().backward()
    with torch.no_grad():
        engine = level_ratio(
            out.old_logprobs - out.rollout_logprobs,
            level,  # type: ignore[arg-type]
            out.sequence,
            out.num_sequences,
        )
        ratio = (out.logprobs - out.old_logprobs).exp()
        expected = -out.advantages * ratio * engine
    assert out.rollout_logprobs.grad is None
    torch.testing.assert_close(out.logprobs.grad, expected)
    torch.testing.assert_close(out.old_logprobs.grad, -expected)


def test_low_var_is_k3_within_ten() -> None:
    distances = torch.tensor([-2.7, -2.6, -2.0, 0.0, 5.0, 10.9, 11.1, 40.0], dtype=torch.float64)
    found = kl_estimate(distances, torch.zeros_like(distances), "low_var")
    k3 = kl_estimate(distances, torch.zeros_like(distances), "k3")
    assert (k3 > 10).tolist() == [True, False, False, False, False, False, True, True]
    assert found.tolist() == torch.where(k3 > 10, 10.0, k3).tolist()


def test_opsm_leaves_out_what_got_worse_alone() -> None:
    advantages = [-1.0, 0.0, 1.0]
    far = _input([-2.0, -2.0, -2.0], [-1.0, -1.0, -1.0], [0.0] * 3, advantages)
    assert opsm_masked(far, far.old_logprobs, delta=0.5).tolist() == [True, False, False]
    assert opsm_masked(far, far.old_logprobs, delta=1.0).tolist() == [False, False, False]

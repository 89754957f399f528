"""The policy loss on a GPU: every term gives what a CPU gives, with the same bits each time."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from spmd_rl.algo.losses import LossInput
from spmd_rl.algo.policy.policy_loss import Surrogate, policy_loss
from spmd_rl.train.fsdp2.determinism import deterministic

pytestmark = pytest.mark.gpu

NUM_SEQUENCES, NUM_TOKENS = 300, 20_000
every_term = partial(
    policy_loss,
    dual_clip=3.0,
    kl_coef=0.1,
    kl_unbiased=True,
    entropy_coef=0.01,
    opsm_delta=0.001,
    correction="clip",
    correction_level="geometric",
    reject="sequence",
    reject_high=3.0,
    veto=0.65,
)


def draw(device: str) -> LossInput:
    generator = torch.Generator().manual_seed(0)
    sequence = torch.randint(NUM_SEQUENCES, (NUM_TOKENS,), generator=generator).sort().values
    rows = torch.randn(6, NUM_TOKENS, generator=generator) * 0.1 - 1
    logprobs, old, rollout, advantages, entropy, reference = rows.to(device)
    return LossInput(
        logprobs.requires_grad_(),
        old,
        rollout,
        advantages + 1,
        entropy,
        sequence.to(device),
        NUM_SEQUENCES,
        {"reference_logprobs": reference},
    )


def loss_and_gradient(out: LossInput, surrogate: Surrogate) -> tuple[torch.Tensor, torch.Tensor]:
    loss, _ = every_term(out, surrogate=surrogate)
    loss.sum().backward()
    assert out.logprobs.grad is not None
    return loss.detach().cpu(), out.logprobs.grad.cpu()


@pytest.mark.parametrize("surrogate", ["ppo", "gspo", "cispo"])
def test_the_loss_is_that_of_a_cpu(surrogate: Surrogate) -> None:
    with deterministic():
        first, again = (loss_and_gradient(draw("cuda"), surrogate) for _ in range(2))
    expected = loss_and_gradient(draw("cpu"), surrogate)
    for ours, same, theirs in zip(first, again, expected, strict=True):
        assert torch.equal(ours, same)
        # a ratio at a bound may fall to either side
        close = torch.isclose(ours, theirs, rtol=1e-4, atol=1e-6)
        assert close.float().mean() > 0.999

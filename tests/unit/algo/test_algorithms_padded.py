"""Every algorithm against a second implementation, with padded tensors, on the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.algo.by_hand import flat_logprobs
from tests.unit.algo.cases import batch_of, draw_case, kept_answers, loss_and_gradient
from tests.unit.algo.padded import padded_loss
from tests.unit.algo.test_algorithms_by_hand import CASES, MAX_TOKENS, algorithm


@pytest.mark.parametrize("observations", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient(case: str, observations: bool) -> None:
    name, settings, by_hand = CASES[case]
    made = algorithm(name, **settings)
    for seed in range(10, 20):
        answers = kept_answers(draw_case(seed, observations=observations), made)
        logprobs = flat_logprobs(answers)
        leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
        expected = padded_loss(answers, leaf, {"max_tokens": MAX_TOKENS} | by_hand)
        expected.backward()
        assert leaf.grad is not None
        batch = batch_of(answers, made)
        loss, gradient = loss_and_gradient(made, batch, logprobs, num_shards=2, num_micros=2)
        size = float(leaf.grad.abs().max())
        assert abs(loss - expected.item()) <= 1e-6 * max(size, abs(expected.item()), 1e-3)
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=0, atol=1e-6 * max(size, 1e-3))

"""Ways of computing a log-probability, each against float64."""

from __future__ import annotations

import pytest
import torch

from spmd_rl.microscope.diagnose.variants import VariantInputs, variants

ROUNDED = {
    "the library's log-softmax of logits rounded to bfloat16": 0.02,
    "the library's log-softmax in bfloat16": 0.1,
}


@pytest.mark.parametrize("says", [says for says, _ in variants("logprob")])
def test_a_log_prob_is_what_its_name_says(says: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, rows = torch.randn(50, 3000, generator=generator) * 3, torch.arange(50)
    targets = torch.randint(0, 3000, (50,), generator=generator)
    temperatures = torch.linspace(0.3, 1.7, 50)
    given = VariantInputs((logits,), None, None, rows, targets, temperatures, rows >= 0)  # type: ignore[arg-type]
    scale = torch.ones(50) if says == "the log-prob at temperature 1" else temperatures
    expected = (logits.double() / scale[:, None]).log_softmax(-1).gather(1, targets[:, None])
    out = dict(variants("logprob"))[says](given)
    assert out.shape == (50, 1)
    torch.testing.assert_close(
        out.double(), expected, rtol=ROUNDED.get(says, 1e-5), atol=ROUNDED.get(says, 1e-5)
    )


def test_no_two_ways_have_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, rows = torch.randn(400, 3000, generator=generator), torch.arange(400)
    given = VariantInputs((logits,), None, None, rows, rows, torch.full((400,), 0.7), rows >= 0)  # type: ignore[arg-type]
    outs = [compute(given).flatten().tolist() for _, compute in variants("logprob")]
    assert all(one != other for i, one in enumerate(outs) for other in outs[:i])

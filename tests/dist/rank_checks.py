"""What is checked of trainers whose ranks share sequences or matrices, beside the bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.dist.train_case import make_batch


def check_gradients(folder: Path, gradients: Path) -> None:
    """Compare gradients of a train step's loss with those of transformers in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    batch, logprobs = make_batch(0), []
    starts = np.cumsum(batch.lengths) - batch.lengths
    temperature = torch.from_numpy(np.where(batch.temperature == 0, 1, batch.temperature))
    for start, length, one in zip(starts, batch.lengths, temperature.double(), strict=True):
        tokens = torch.from_numpy(batch.tokens[start : start + length]).long()
        rows = (model(tokens[None]).logits[0] / one).log_softmax(-1)
        logprobs += [rows.new_zeros(1), rows[:-1].gather(1, tokens[1:, None])[:, 0]]
    weight = torch.from_numpy(batch.weight * batch.advantages * batch.mask).double()
    loss = -(weight * torch.cat(logprobs)).sum() / batch.denominator
    loss.backward()
    found = load_file(gradients)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (found[name].double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < 2e-5, name


def check_scores(
    alone: Sequence[Mapping[str, float]], shared: Sequence[Mapping[str, float]]
) -> None:
    """Check the metrics of steps whose loss has entropies and candidates."""
    for step, other in zip(alone, shared, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert other[name] == pytest.approx(step[name], rel=2e-5)
        assert other["onpolicy/compared_tokens"] == step["onpolicy/compared_tokens"]
        assert other["train/tokens"] == step["train/tokens"]

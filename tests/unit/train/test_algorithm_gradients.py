"""Gradients of algorithms through a model, against transformers in float64 and a second formula."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.algo.cases import Answer, batch_of, draw_case, groups_of
from tests.unit.algo.padded import padded_loss
from tests.unit.algo.test_algorithms_by_hand import CASES, MAX_TOKENS, algorithm
from tests.unit.train.test_beyond_policies import distance, gradients

FAMILIES = (
    "grpo",
    "dr_grpo",
    "gspo, wide",
    "cispo, narrow",
    "gdpo",
    "reinforce_pp",
    "ppo",
    "kl k3, unbiased",
    "entropy",
    "correction mask sequence",
)


@pytest.fixture
def exported(new_trainer: Any, tmp_path: Path) -> Any:
    """The trainer's first weights as a model of transformers in float64."""
    from transformers import AutoModelForCausalLM

    new_trainer().export_hf(str(tmp_path / "hf"))
    return AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)


def score(model: Any, answers: list[Answer]) -> tuple[list[Tensor], list[Tensor]]:
    """Return log-probs and entropies of each answer, one sequence at a time."""
    logprobs, entropies = [], []
    for group in groups_of(answers):
        for sample in group.samples:
            tokens = torch.tensor(np.concatenate([group.prompt.tokens, sample.tokens])).long()
            logits = model(tokens[None]).logits[0, len(group.prompt.tokens) - 1 : -1]
            log = logits.log_softmax(-1)
            targets = tokens[len(group.prompt.tokens) :]
            logprobs.append(log.gather(1, targets[:, None])[:, 0])
            entropies.append(-(log.exp() * log).sum(-1))
    return logprobs, entropies


def around(answers: list[Answer], logprobs: list[Tensor]) -> list[Answer]:
    """Return the answers with the model's log-probs, and others near them."""
    rng = np.random.default_rng(0)
    moved = []
    for answer, row in zip(answers, logprobs, strict=True):
        own = row.detach().numpy()

        def near(spread: float, own: Any = own) -> list[float]:
            return np.float32(own + spread * rng.standard_normal(len(own))).astype(float).tolist()

        moved.append(
            replace(
                answer,
                logprobs=own.tolist(),
                old=near(0.2),
                rollout=near(0.3),
                reference=near(0.2),
            )
        )
    return moved


def distance_of(new_trainer: Any, exported: Any, case: str, other: str = "") -> float:
    """Return how far the trainer's gradients are from float64's, over the norm of those.

    The trainer learns with the case `other`, if one is named.
    """
    _, _, by_hand = CASES[case]
    name, settings, _ = CASES[other or case]
    made, drawn = algorithm(name, **settings), draw_case(5)
    logprobs, entropies = score(exported, drawn)
    answers = around(drawn, logprobs)
    theirs = {"max_tokens": MAX_TOKENS} | by_hand | {"entropy": 0.0}
    loss = padded_loss(answers, torch.cat(logprobs), theirs)
    loss = loss - by_hand.get("entropy", 0.0) * torch.cat(entropies).mean()
    loss.backward()
    batch, trainer = batch_of(answers, made), new_trainer(max_tokens=30, logit_rows=7)
    found = gradients(trainer, lambda: trainer.train_step(batch, made.loss, needs=made.loss_needs))
    expected = {key: parameter.grad for key, parameter in exported.named_parameters()}
    assert found.keys() == expected.keys()
    assert torch.cat([gradient.flatten() for gradient in expected.values()]).norm() > 1e-4
    return distance(found, expected)


@pytest.mark.parametrize("case", FAMILIES)
def test_gradients(new_trainer: Any, exported: Any, case: str) -> None:
    assert distance_of(new_trainer, exported, case) <= 2e-5


def test_the_gradients_of_another_algorithm_are_others(new_trainer: Any, exported: Any) -> None:
    assert distance_of(new_trainer, exported, "grpo", other="rloo") > 1e-2

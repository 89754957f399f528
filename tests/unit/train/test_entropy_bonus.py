"""Train steps on the entropy and on candidates: a loss learns from them if it asks for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.algo.losses import LossInput, Needs
from spmd_rl.types.batch import Batch
from tests.dist.train_case import VOCAB, make_batch

NUM_CANDIDATES = 3


def entropy_bonus(out: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    return -out.entropy, {}


def imitation(out: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    assert out.candidate_logprobs is not None
    return -out.candidate_logprobs.sum(1), {}


def with_candidates(batch: Batch) -> Batch:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (batch.num_tokens, NUM_CANDIDATES), dtype=np.int32)
    return batch.with_columns(candidates=np.where(batch.mask[:, None], ids, 0).astype(np.int32))


@pytest.mark.parametrize("options", [{}, {"recompute": "all", "logit_rows": 16}])
def test_a_bonus_raises_the_entropy(new_trainer, options: dict[str, object]) -> None:
    trainer, batch = new_trainer(**options), make_batch()
    needs = Needs(entropy=True)
    steps = [trainer.train_step(batch, entropy_bonus, needs=needs) for _ in range(3)]
    entropies = [step["train/entropy"] for step in steps]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.01


@pytest.mark.parametrize(
    ("loss", "needs"),
    [(entropy_bonus, Needs(entropy=True)), (imitation, Needs(candidates=True))],
    ids=["entropy", "candidates"],
)
def test_the_gradient_does_not_depend_on_micro_batches(new_trainer, loss, needs: Needs) -> None:
    batch, norms = with_candidates(make_batch()), []
    for options in ({}, {"max_tokens": 40}, {"logit_rows": 7}, {"recompute": "all"}):
        norms.append(new_trainer(**options).train_step(batch, loss, needs=needs)["train/grad_norm"])
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)
    assert norms[0] > 0


def test_candidates_become_likely(new_trainer) -> None:
    trainer, batch = new_trainer(), with_candidates(make_batch())
    losses = [
        trainer.train_step(batch, imitation, needs=Needs(candidates=True))["train/loss"]
        for _ in range(3)
    ]
    assert losses == sorted(losses, reverse=True)
    assert torch.isfinite(torch.tensor(losses)).all()

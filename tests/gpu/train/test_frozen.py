"""A frozen model on a GPU: the trainer's bits, in the memory of its weights in bfloat16."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spmd_rl.algo.losses import ValueInput, grpo_loss
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.read import read_spec
from spmd_rl.train.config import FrozenConfig, Fsdp2Config, TrainerConfig, Wrap
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.trainer import Trainer
from spmd_rl.train.value_trainer import ValueTrainer
from tests.dist.train_case import make_batch

CONFIG = TrainerConfig(init="random", lr=1e-2, max_tokens=150)


@pytest.mark.parametrize("wrap", ["layer", "model"])
def test_log_probs_have_the_trainers_bits(context: RoleContext, model: Path, wrap: Wrap) -> None:
    cfg = replace(CONFIG, backend=Fsdp2Config(wrap=wrap))
    trainer, batch = Trainer(cfg, context, str(model)), make_batch()
    frozen = FrozenModel(replace(FrozenConfig.like(cfg), max_tokens=9999), context, str(model))
    expected = trainer.score(batch).values
    assert frozen.score(batch).values.tobytes() == expected.tobytes()
    assert frozen.numeric_contract() == trainer.numeric_contract()
    trainer.train_step(batch, grpo_loss)
    assert frozen.score(batch).values.tobytes() == expected.tobytes()
    assert trainer.score(batch).values.tobytes() != expected.tobytes()


def test_it_takes_two_bytes_for_each_parameter(context: RoleContext, model: Path) -> None:
    first = FrozenModel(FrozenConfig.like(CONFIG), context, str(model))
    first.score(make_batch())  # so that libraries have their workspaces
    gc.collect()  # models of earlier tests do not go in between
    before = torch.cuda.memory_allocated()
    frozen = FrozenModel(FrozenConfig.like(CONFIG), context, str(model))
    frozen.score(make_batch())
    taken = torch.cuda.memory_allocated() - before
    num_bytes = 2 * read_spec(model).num_parameters
    assert num_bytes <= taken < 1.5 * num_bytes


def test_the_likeliest_token_has_the_log_prob_that_it_is_scored_with(
    context: RoleContext, model: Path
) -> None:
    frozen = FrozenModel(FrozenConfig.like(CONFIG), context, str(model))
    batch = make_batch()
    top = frozen.top_logprobs(batch, 3)
    position = int(np.flatnonzero(batch.mask)[5])
    for place in range(3):
        tokens, mask = batch.tokens.copy(), np.zeros_like(batch.mask)
        tokens[position], mask[position] = top.ids.values[position, place], True
        scored = frozen.score(replace(batch, tokens=tokens, mask=mask)).values[position]
        assert scored == top.logprobs.values[position, place]
    assert (np.diff(top.logprobs.values[batch.mask], axis=1) <= 0).all()


def test_a_critic_learns_in_bfloat16(context: RoleContext, model: Path) -> None:
    critic = ValueTrainer(replace(CONFIG, lr=1e-3), context, str(model))
    batch = make_batch()
    batch = batch.with_columns(returns=batch.mask.astype(np.float32))

    def squares(out: ValueInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (out.values - out.columns["returns"]) ** 2, {}

    losses = [critic.train_step(batch, squares)["train/loss"] for _ in range(10)]
    assert losses[0] == pytest.approx(1)
    assert losses[-1] < 0.5
    assert critic.rewards(batch).values.shape == (batch.num_sequences,)

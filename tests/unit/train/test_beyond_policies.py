"""DPO, distillation and reward models through a whole model: gradients of ragged batches in several
micro-batches, against torch's own functions on a plain model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, logsigmoid

from spmd_rl.algo.distill import topk_kl_loss, with_candidates
from spmd_rl.algo.dpo import bradley_terry_loss, dpo_loss
from spmd_rl.algo.losses import Needs
from spmd_rl.algo.packing import pack_sft
from spmd_rl.algo.pair_packing import pack_pairs
from spmd_rl.evaluation.held_out_scores import pair_measures, pair_scores
from spmd_rl.kernels import PackedAttention
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.model.value_head import ValueModel
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.training_role import TrainingRole
from spmd_rl.train.value_trainer import ValueTrainer
from spmd_rl.types.batch import Batch
from spmd_rl.types.sequence_ends import sequence_ends
from tests.dist.train_case import VOCAB, local_weights

SEVERAL = 40  # tokens of a micro-batch: fewer than the batch has, and than its longest pair


def sequences(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ragged sequences; two neighbours share their prompt."""
    rng = np.random.default_rng(4)
    found = []
    for _ in range(count // 2):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 12))).astype(np.int32)
        for _ in range(2):
            answer = rng.integers(0, VOCAB, int(rng.integers(1, 20))).astype(np.int32)
            tokens = np.concatenate([prompt, answer])
            found.append((tokens, np.arange(len(tokens)) >= len(prompt)))
    return found


def pairs(count: int) -> Batch:
    both = sequences(2 * count)
    return pack_pairs([*zip(both[0::2], both[1::2], strict=True)])


def gradients(trainer: TrainingRole, train: Callable[[], Any]) -> dict[str, Tensor]:
    """The gradients of all parameters at the optimizer step that `train` takes."""
    found: dict[str, Tensor] = {}
    step = trainer.backend.step

    def watched(lr: float, scale: float) -> None:
        local = trainer.backend.local
        found.update(
            {name: one.grad.clone() for name, one in local.items() if one.grad is not None}
        )
        step(lr, scale)

    trainer.backend.step = watched
    train()
    trainer.backend.step = step
    return found


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference as a share of the norm of what is expected."""
    square = sum(float(((found[name] - expected[name]).double() ** 2).sum()) for name in expected)
    whole = sum(float((value.double() ** 2).sum()) for value in expected.values())
    return (square / whole) ** 0.5


def by_autograd(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def hidden_states(model: Any, batch: Batch) -> list[Tensor]:
    """The states of each sequence alone that precede the tokens of its mask."""
    found, ends = [], np.cumsum(batch.lengths)
    for start, end in zip(ends - batch.lengths, ends, strict=True):
        tokens = torch.from_numpy(batch.tokens[start:end]).long()
        attend = PackedAttention(np.array([len(tokens)]), device=tokens.device)
        states = model(tokens, torch.arange(len(tokens)), attend)
        found.append(states[np.flatnonzero(batch.mask[start:end]) - 1])
    return found


def plain_logprobs(model: CausalLM, batch: Batch) -> list[Tensor]:
    """Log-probs over the whole vocabulary, a list of [R, V] in float64."""
    return [model.logits(state).double().log_softmax(-1) for state in hidden_states(model, batch)]


def plain_model(trainer: TrainingRole) -> CausalLM:
    model = CausalLM(read_spec(trainer.model))
    model.load_state_dict(
        {name: one.local.detach() for name, one in local_weights(trainer).items()}
    )
    return model


def of_tokens(batch: Batch, logprobs: list[Tensor]) -> Tensor:
    """The log-prob of each answer."""
    targets = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    masks = np.split(batch.mask, np.cumsum(batch.lengths)[:-1])
    ids = [torch.from_numpy(t[m]).long() for t, m in zip(targets, masks, strict=True)]
    return torch.stack(
        [lp.gather(1, one[:, None]).sum() for lp, one in zip(logprobs, ids, strict=True)]
    )


@pytest.fixture
def new_frozen(context: RoleContext, model_folder: Any) -> Callable[[int], FrozenModel]:
    def build(seed: int) -> FrozenModel:
        return FrozenModel(FrozenConfig(init="random", seed=seed), context, str(model_folder))

    return build


@pytest.mark.parametrize("max_tokens", [SEVERAL, 9999])
def test_dpo(new_trainer: Any, new_frozen: Any, max_tokens: int) -> None:
    trainer, reference = new_trainer(max_tokens=max_tokens, clip_norm=0.0), new_frozen(seed=5)
    batch = pairs(6)
    batch = batch.with_columns(reference_logprobs=reference.score(batch))
    model, stats = plain_model(trainer), {}
    loss = partial(dpo_loss, beta=0.3)
    found = gradients(trainer, lambda: stats.update(trainer.train_step(batch, loss)))

    other = CausalLM(read_spec(trainer.model))
    other.load_state_dict(dict(random_weights(other.spec, 5)))
    ratios = (
        of_tokens(batch, plain_logprobs(model, batch))
        - of_tokens(batch, plain_logprobs(other, batch)).detach()
    )
    h = ratios[0::2] - ratios[1::2]
    expected = -logsigmoid(0.3 * h).mean()
    assert stats["train/loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert stats["dpo/accuracy"] == pytest.approx((h > 0).double().mean().item())
    assert stats["dpo/margin"] == pytest.approx(0.3 * h.mean().item(), rel=1e-4)
    assert distance(found, by_autograd(model, expected)) < 2e-5

    swapped = plain_model(new_trainer())
    ratios = of_tokens(batch, plain_logprobs(swapped, batch)) - ratios.detach() * 0
    wrong = by_autograd(swapped, -logsigmoid(0.3 * (ratios[1::2] - ratios[0::2])).mean())
    assert distance(found, wrong) > 0.1


@pytest.mark.parametrize("max_tokens", [SEVERAL, 9999])
def test_a_reward_model(context: RoleContext, model_folder: Any, max_tokens: int) -> None:
    cfg = TrainerConfig(init="random", lr=1e-2, eps=1e-4, max_tokens=max_tokens, clip_norm=0.0)
    trainer = ValueTrainer(cfg, context, str(model_folder))
    batch = pairs(6)
    ends = sequence_ends(batch)
    trainer.train_step(ends, bradley_terry_loss)  # the head is no longer zero
    model = ValueModel(read_spec(trainer.model))
    model.load_state_dict(
        {name: one.local.detach() for name, one in local_weights(trainer).items()}
    )
    rewards = trainer.rewards(batch).values
    stats: dict[str, float] = {}
    loss = partial(bradley_terry_loss, margin=0.1, center_coef=0.2)
    found = gradients(trainer, lambda: stats.update(trainer.train_step(ends, loss)))

    weight = model.score.weight.double()[0]
    plain = torch.cat([state.double() @ weight for state in hidden_states(model, ends)])
    assert len(plain) == batch.num_sequences
    np.testing.assert_allclose(rewards, plain.detach(), atol=1e-5)
    difference, both = plain[0::2] - plain[1::2], plain[0::2] + plain[1::2]
    expected = (-logsigmoid(difference - 0.1) + 0.2 * both**2).mean()
    assert stats["train/loss"] == pytest.approx(expected.item(), rel=1e-5)
    scores = pair_scores(pair_measures(rewards))
    for name in ("accuracy", "margin"):
        assert stats[f"reward_model/{name}"] == pytest.approx(scores[name], abs=1e-5)
    assert distance(found, by_autograd(model, expected)) < 2e-5


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("max_tokens", [SEVERAL, 9999])
def test_distillation_of_the_whole_vocabulary(
    new_trainer: Any, new_frozen: Any, max_tokens: int, direction: str
) -> None:
    trainer, teacher = new_trainer(max_tokens=max_tokens, clip_norm=0.0), new_frozen(seed=5)
    batch = pack_sft(sequences(8))
    top = teacher.top_logprobs(batch, VOCAB)
    batch = with_candidates(batch, top.ids, top.logprobs)
    model, stats = plain_model(trainer), {}
    loss, needs = partial(topk_kl_loss, direction=direction), Needs(candidates=True)
    found = gradients(trainer, lambda: stats.update(trainer.train_step(batch, loss, needs=needs)))

    other = CausalLM(read_spec(trainer.model))
    other.load_state_dict(dict(random_weights(other.spec, 5)))
    student = torch.cat(plain_logprobs(model, batch))
    target = torch.cat(plain_logprobs(other, batch)).detach()
    both = (student, target) if direction == "forward" else (target, student)
    expected = kl_div(*both, reduction="none", log_target=True).sum(-1).mean()
    assert stats["train/loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert stats["distill/topk_kl"] == pytest.approx(expected.item(), rel=1e-4)
    assert distance(found, by_autograd(model, expected)) < 2e-5

"""DPO and reward-model losses against formulas written by hand in float64, with broken variants."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.algo.dpo import bradley_terry_loss, dpo_loss
from spmd_rl.algo.losses import LossInput, ValueInput
from spmd_rl.algo.pair_packing import pack_pairs
from spmd_rl.errors import ConfigError, ContractError
from spmd_rl.evaluation.held_out_scores import dpo_rewards, pair_measures, pair_scores
from spmd_rl.types.batch import Batch
from spmd_rl.types.token_values import TokenValues

# (prompt, chosen, rejected) lengths: ragged, and a rejected answer without a token
SHAPES = [(2, 3, 1), (1, 1, 4), (4, 2, 0), (3, 5, 5)]
VARIANTS: list[dict[str, Any]] = [
    {"beta": 0.1},
    {"beta": 0.5, "label_smoothing": 0.2},
    {"beta": 0.3, "loss_type": "ipo"},
    {"beta": 0.7, "loss_type": "hinge"},
]


def batch_of_pairs() -> Batch:
    def sequence(prompt: int, answer: int) -> tuple[np.ndarray, np.ndarray]:
        length = prompt + answer
        return np.arange(length, dtype=np.int32), np.arange(length) >= prompt

    return pack_pairs([(sequence(p, c), sequence(p, r)) for p, c, r in SHAPES])


def micro(batch: Batch, logprobs: Tensor, reference: Tensor, part: list[int]) -> LossInput:
    """What the loss reads of some sequences; values are given for each token of the whole batch."""
    owner = np.repeat(np.arange(batch.num_sequences), batch.lengths)
    rows = [t for s in part for t in np.flatnonzero((owner == s) & batch.mask)]
    numbers = [part.index(owner[row]) for row in rows]
    zeros = torch.zeros(len(rows), dtype=logprobs.dtype)
    return LossInput(
        logprobs=logprobs[rows],
        old_logprobs=zeros,
        rollout_logprobs=zeros,
        advantages=zeros,
        entropy=zeros,
        sequence=torch.tensor(numbers, dtype=torch.int64),
        num_sequences=len(part),
        columns={
            "reference_logprobs": reference[rows],
            "pair_scale": torch.from_numpy(batch.columns["pair_scale"])[rows],
        },
    )


def values(batch: Batch) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    size = batch.num_tokens
    logprobs = -3 * torch.rand(size, generator=rng, dtype=torch.float64)
    return logprobs.requires_grad_(), -3 * torch.rand(size, generator=rng, dtype=torch.float64)


def trained(batch: Batch, loss: Callable[..., Any], splits: list[list[int]]) -> tuple[Any, ...]:
    """Loss, gradient and metrics as the trainer computes them over micro-batches."""
    logprobs, reference = values(batch)
    total, sums, num_tokens = torch.zeros((), dtype=torch.float64), {}, 0
    for part in splits:
        out = micro(batch, logprobs, reference, part)
        per_token, measured = loss(out)
        assert per_token.shape == out.sequence.shape
        total = total + per_token.sum() / batch.denominator
        num_tokens += len(per_token)
        for name, value in measured.items():
            sums[name] = sums.get(name, 0.0) + float(value.sum())
    total.backward()
    return total.item(), logprobs.grad, {name: s / num_tokens for name, s in sums.items()}


def by_hand(
    batch: Batch,
    beta: float,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    flip: bool = False,
    no_reference: bool = False,
) -> tuple[float, Tensor, dict[str, float]]:
    """The formulas of the papers, pair by pair with Python floats."""
    logprobs, reference = values(batch)
    lp, ref = logprobs.detach().numpy(), reference.numpy() * (not no_reference)
    starts = np.cumsum(batch.lengths) - batch.lengths
    rows = [
        [t for t in range(start, start + length) if batch.mask[t]]
        for start, length in zip(starts, batch.lengths, strict=True)
    ]
    gradient, total, rights, margins = torch.zeros(len(lp), dtype=torch.float64), 0.0, [], []
    num_pairs = len(rows) // 2
    for number in range(num_pairs):
        won, lost = rows[2 * number], rows[2 * number + 1]
        sums = [math.fsum(lp[t] - ref[t] for t in answer) for answer in (won, lost)]
        sizes = [max(len(won), 1), max(len(lost), 1)] if loss_type == "ipo" else [1, 1]
        h = sums[0] / sizes[0] - sums[1] / sizes[1]
        h = -h if flip else h
        if loss_type == "sigmoid":
            p = 1 / (1 + math.exp(-beta * h))
            total -= (1 - label_smoothing) * math.log(p) + label_smoothing * math.log(1 - p)
            slope = beta * (p - 1 + label_smoothing)
        elif loss_type == "hinge":
            total += max(0.0, 1 - beta * h)
            slope = -beta if beta * h < 1 else 0.0
        else:
            total += (h - 1 / (2 * beta)) ** 2
            slope = 2 * (h - 1 / (2 * beta))
        slope = -slope if flip else slope
        gradient[won] += slope / sizes[0] / num_pairs
        gradient[lost] -= slope / sizes[1] / num_pairs
        rights.append(sums[0] > sums[1])
        margins.append(beta * (sums[0] - sums[1]))
    metrics = {"dpo/accuracy": np.mean(rights), "dpo/margin": np.mean(margins)}
    return total / num_pairs, gradient, metrics


WHOLE, HALVES = [[0, 1, 2, 3, 4, 5, 6, 7]], [[4, 5, 0, 1], [6, 7], [2, 3], []]


@pytest.mark.parametrize("splits", [WHOLE, HALVES])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_dpo_is_its_formula(variant: dict[str, Any], splits: list[list[int]]) -> None:
    batch = batch_of_pairs()
    loss, gradient, metrics = trained(batch, lambda out: dpo_loss(out, **variant), splits)
    expected, expected_gradient, expected_metrics = by_hand(batch, **variant)
    assert loss == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-9, rtol=0)
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6)
    rewards = metrics["dpo/chosen_reward"] - metrics["dpo/rejected_reward"]
    assert rewards == pytest.approx(metrics["dpo/margin"], abs=1e-6)


@pytest.mark.parametrize("broken", [{"flip": True}, {"no_reference": True}], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_broken_formula_is_seen(variant: dict[str, Any], broken: dict[str, bool]) -> None:
    """Swapped pairs (which is the wrong sign of h), and a missing reference."""
    batch = batch_of_pairs()
    loss, gradient, _ = trained(batch, lambda out: dpo_loss(out, **variant), WHOLE)
    wrong, wrong_gradient, _ = by_hand(batch, **variant, **broken)
    assert abs(loss - wrong) > 1e-3
    if "no_reference" not in broken or variant.get("loss_type") != "hinge":
        assert (gradient - wrong_gradient).abs().max() > 1e-4


def test_the_loss_is_on_the_pairs_first_scored_token() -> None:
    batch = batch_of_pairs()
    per_token, _ = dpo_loss(micro(batch, *values(batch), WHOLE[0]))
    sequence = micro(batch, *values(batch), WHOLE[0]).sequence
    firsts = [int((sequence // 2 == pair).nonzero()[0]) for pair in range(4)]
    assert per_token.nonzero().flatten().tolist() == firsts


def test_pairs_stay_together_and_count() -> None:
    batch = batch_of_pairs()
    assert (batch.unit, batch.denominator) == (2, 4.0)
    assert batch.lengths.tolist() == [5, 3, 2, 5, 6, 4, 8, 8]
    assert np.array_equal(batch.weight, batch.mask)
    scale = batch.columns["pair_scale"]
    assert np.count_nonzero(scale) == 4
    assert scale.sum() == pytest.approx(batch.mask.sum())
    for shard in batch.shard(3):
        assert (shard.index.reshape(-1, 2) % 2 == [0, 1]).all()


def test_missing_columns_are_named() -> None:
    batch = batch_of_pairs()
    out = micro(batch, *values(batch), WHOLE[0])
    for name, remedy in {"reference_logprobs": "score", "pair_scale": "pack_pairs"}.items():
        columns = {key: value for key, value in out.columns.items() if key != name}
        with pytest.raises(ContractError, match=f"no column '{name}'.*{remedy}"):
            dpo_loss(replace(out, columns=columns))
    with pytest.raises(ConfigError, match="loss_type"):
        dpo_loss(out, loss_type="no")  # type: ignore[arg-type]
    empty = np.zeros(1, np.int32), np.zeros(1, np.bool_)
    with pytest.raises(ContractError, match="both answers are empty"):
        pack_pairs([(empty, empty)])


def test_held_out_accuracy_is_that_of_the_training_metric() -> None:
    batch = batch_of_pairs()
    logprobs, reference = values(batch)
    as_numpy = [
        value.detach().numpy().astype(np.float32) * batch.mask for value in (logprobs, reference)
    ]
    scored = TokenValues(as_numpy[0], batch.lengths, batch.index)
    scored_batch = batch.with_columns(reference_logprobs=as_numpy[1])
    found = pair_scores(pair_measures(dpo_rewards(scored_batch, scored, beta=0.3)))
    _, _, expected = by_hand(batch, beta=0.3)
    assert found["accuracy"] == expected["dpo/accuracy"]
    assert found["margin"] == pytest.approx(expected["dpo/margin"], abs=1e-6)


def reward_model(rewards: Tensor, **settings: float) -> tuple[Tensor, dict[str, Tensor]]:
    sequence = torch.arange(len(rewards))
    return bradley_terry_loss(ValueInput(rewards, sequence, len(rewards)), **settings)


@pytest.mark.parametrize("settings", [{}, {"margin": 0.4}, {"center_coef": 0.1}], ids=str)
def test_the_reward_model_is_its_formula(settings: dict[str, float]) -> None:
    rewards = torch.tensor([0.3, -0.2, -1.0, 1.5, 2.0, 2.0], dtype=torch.float64).requires_grad_()
    per_token, measured = reward_model(rewards, **settings)
    (per_token.sum() / 3).backward()
    margin, coef = settings.get("margin", 0.0), settings.get("center_coef", 0.0)
    total, gradient = 0.0, []
    for chosen, rejected in rewards.detach().reshape(-1, 2).tolist():
        p = 1 / (1 + math.exp(-(chosen - rejected - margin)))
        total += -math.log(p) + coef * (chosen + rejected) ** 2
        pull = 2 * coef * (chosen + rejected)
        gradient += [p - 1 + pull, 1 - p + pull]
    assert per_token.sum().item() == pytest.approx(total, abs=1e-9)
    assert (rewards.grad * 3).tolist() == pytest.approx(gradient, abs=1e-9)
    assert measured["reward_model/accuracy"].mean().item() == pytest.approx(1 / 3)
    assert measured["reward_model/margin"].mean().item() == pytest.approx((0.5 - 2.5 + 0) / 3)
    # a swapped pair has another loss, and the opposite gradient
    swapped = rewards.detach().reshape(-1, 2).flip(1).reshape(-1)
    assert abs(reward_model(swapped, **settings)[0].sum().item() - total) > 0.1


def test_other_values_are_refused() -> None:
    sequence = torch.tensor([0, 0, 1])
    with pytest.raises(ContractError, match="sequence_ends"):
        bradley_terry_loss(ValueInput(torch.zeros(3), sequence, 2))

"""One rank's train step against an oracle: a plain model, plain autograd, torch's own unfused
AdamW.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spmd_rl.algo.losses import LossInput, grpo_loss, sft_loss
from spmd_rl.errors import ContractError, DataError, SpmdError
from spmd_rl.kernels import PackedAttention, Scores
from spmd_rl.model.hf import random_weights, save_folder
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.model.scorer import Scorer
from spmd_rl.train import config, learner
from spmd_rl.train.cost.flops import train_flops
from spmd_rl.train.fsdp2 import sharded_model
from spmd_rl.train.microbatch import MicroBatch, split_sequences
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from tests.dist.train_case import local_weights, make_batch


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: one.local.detach().clone() for name, one in local_weights(trainer).items()}


class Oracle:
    """Sequence by sequence, the policy gradient of on-policy GRPO and AdamW as the papers write
    them.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.cfg = cfg = trainer.cfg
        spec = read_spec(trainer.model)
        self.model = CausalLM(spec)
        self.model.load_state_dict(dict(random_weights(spec, cfg.seed)))
        decay = [one for one in self.model.parameters() if one.dim() > 1]
        plain = [one for one in self.model.parameters() if one.dim() == 1]
        groups = [
            {"params": decay, "weight_decay": cfg.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, foreach=False
        )

    def step(self, batch: Batch) -> tuple[float, float]:
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        ends = np.cumsum(batch.lengths)
        for start, end, temperature in zip(
            ends - batch.lengths, ends, batch.temperature, strict=True
        ):
            tokens = torch.from_numpy(batch.tokens[start:end]).long()
            attend = PackedAttention(np.array([len(tokens)]), device=tokens.device)
            logits = self.model.logits(self.model(tokens, torch.arange(len(tokens)), attend))
            lp = (
                (logits.double() / float(temperature or 1.0))
                .log_softmax(-1)[:-1]
                .gather(1, tokens[1:, None])[:, 0]
            )
            coefficient = torch.from_numpy(batch.weight * batch.advantages).double()[
                start + 1 : end
            ]
            # The surrogate's value is -A, its gradient -A grad(lp).
            total = total - (coefficient * (1 + lp - lp.detach())).sum() / batch.denominator
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.cfg.clip_norm, foreach=False
        )
        self.optimizer.step()
        return float(total.detach()), float(norm)


@pytest.mark.parametrize("aggregation", ["token", "sample", "const"])
def test_against_a_plain_model_and_adamw(new_trainer, aggregation: str) -> None:
    trainer = new_trainer(max_tokens=120, clip_norm=0.05, weight_decay=0.1, wrap="layer")
    oracle = Oracle(trainer)
    for seed in range(3):
        batch = make_batch(seed, aggregation)
        stats = trainer.train_step(batch, grpo_loss)
        loss, norm = oracle.step(batch)
        assert stats["train/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert stats["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert norm > trainer.cfg.clip_norm
    expected = dict(oracle.model.named_parameters())
    for name, one in _weights(trainer).items():
        torch.testing.assert_close(one, expected[name].detach(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 50},
        {"wrap": "layer"},
        {"recompute": "cheap"},
        {"recompute": "all"},
        {"logit_rows": 9},
    ],
)
def test_how_it_is_computed_does_not_change_what(new_trainer, options: dict[str, object]) -> None:
    plain, other = new_trainer(), new_trainer(**options)
    for seed in range(2):
        expected, stats = (one.train_step(make_batch(seed), grpo_loss) for one in (plain, other))
        for name in ("train/loss", "train/grad_norm", "train/entropy", "onpolicy/k3"):
            assert stats[name] == pytest.approx(expected[name], rel=1e-5), name
    for name, one in _weights(other).items():
        torch.testing.assert_close(one, _weights(plain)[name], rtol=1e-4, atol=1e-5)


def test_a_model_is_gathered_whole_unless_it_is_large(
    new_trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = new_trainer().backend.scorer.model.spec.num_layers
    whole, by_layer = len(new_trainer().backend.units), len(new_trainer(wrap="layer").backend.units)
    monkeypatch.setattr(config, "WHOLE_MODEL_BYTES", 0)
    assert (whole, by_layer, len(new_trainer().backend.units)) == (1, layers + 1, layers + 1)


def test_minibatches_take_as_many_optimizer_steps_against_the_first_weights(new_trainer) -> None:
    trainer = new_trainer(minibatches=3)
    stats = trainer.train_step(make_batch(), grpo_loss)
    assert trainer.learner.state.optimizer_steps == 3
    assert trainer.version() == 1
    assert stats["train/clip_frac"] > 0
    assert new_trainer().train_step(make_batch(), grpo_loss)["train/clip_frac"] == 0


def test_each_minibatch_divides_by_its_share_of_the_denominator(new_trainer) -> None:
    """At a rate of 0 the weights stay, so that the float64 oracle knows the gradient of each
    optimizer step.
    """
    trainer, batch = new_trainer(minibatches=3, lr=0.0), make_batch()
    oracle = Oracle(new_trainer(lr=0.0))
    parts = [batch.select(part) for part in split_sequences(batch.lengths.tolist(), 3)]
    norms = [oracle.step(replace(part, denominator=batch.denominator / 3))[1] for part in parts]
    stats = trainer.train_step(batch, grpo_loss)
    assert stats["train/grad_norm"] == pytest.approx(sum(norms) / 3, rel=1e-4)


def test_what_is_compared_is_differentiated_wherever_the_weights_are_still_the_first(
    new_trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the first minibatch is computed once; the others once more, before any of them moves the
    weights.
    """
    trainer = new_trainer(minibatches=3, max_tokens=9999)
    with_gradients, score = [], trainer.backend.scorer.forward

    def watched(micro: MicroBatch, **options: Any) -> Scores:
        with_gradients.append(torch.is_grad_enabled())
        return score(micro, **options)

    monkeypatch.setattr(trainer.backend.scorer, "forward", watched)
    trainer.train_step(make_batch(), grpo_loss)
    assert with_gradients == [False, False, True, True, True]


@pytest.mark.parametrize("init", ["random", "folder"])
def test_a_model_has_no_memory_before_it_is_sharded(
    new_trainer, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str
) -> None:
    spec, folder, there = read_spec(model_folder), tmp_path / "hf", []
    save_folder(folder, model_folder, random_weights(spec, seed=3))
    shard = sharded_model.shard

    def looked_at(modules: list[Scorer], *rest: Any) -> Any:
        there.extend(parameter.device.type for parameter in modules[-1].parameters())
        return shard(modules, *rest)

    monkeypatch.setattr(sharded_model, "shard", looked_at)
    weights = _weights(new_trainer(model=str(folder), init=init, seed=3))
    assert set(there) == {"meta"}
    assert weights.keys() == spec.parameter_shapes().keys()
    assert all(torch.equal(weights[name], whole) for name, whole in random_weights(spec, seed=3))


def test_there_are_no_more_minibatches_than_sequences(new_trainer) -> None:
    """An optimizer step without a sequence would move the weights by its momentum alone."""
    batch = make_batch()
    few, many = new_trainer(minibatches=len(batch.lengths)), new_trainer(minibatches=50)
    for trainer in (few, many):
        trainer.train_step(batch, grpo_loss)
    assert (
        many.learner.state.optimizer_steps
        == few.learner.state.optimizer_steps
        == len(batch.lengths)
    )
    expected = _weights(few)
    assert all(torch.equal(one, expected[name]) for name, one in _weights(many).items())


@pytest.mark.parametrize("wrap", ["model", "layer"])
def test_scores_are_of_new_weights_also_where_no_step_brought_them(new_trainer, wrap: str) -> None:
    """A checkpoint that is loaded, for one: what the last forward pass gathered must not be used
    again.
    """
    trainer, fresh, batch = new_trainer(wrap=wrap), new_trainer(wrap=wrap, seed=3), make_batch()
    before, expected = (one.learner.score(batch) for one in (trainer, fresh))
    trainer.backend.fill(random_weights(read_spec(trainer.model), seed=3))
    assert np.array_equal(trainer.learner.score(batch), expected)
    assert not np.array_equal(before, expected)


def test_bfloat16_trains_a_float32_master(new_trainer) -> None:
    trainer = new_trainer(dtype="bfloat16")
    exact = new_trainer().train_step(make_batch(), sft_loss)
    stats = trainer.train_step(make_batch(), sft_loss)
    assert stats["train/loss"] == pytest.approx(exact["train/loss"], rel=0.02)
    assert stats["train/loss"] != exact["train/loss"]
    assert {one.dtype for one in local_weights(trainer).values()} == {"float32"}


@pytest.mark.parametrize(("value", "what"), [(np.nan, "loss"), (3e38, "gradient")])
def test_a_loss_that_is_not_finite_stops_before_the_weights(
    new_trainer, value: float, what: str
) -> None:
    trainer, batch = new_trainer(), make_batch()
    trainer.train_step(batch, grpo_loss)
    before = _weights(trainer)
    advantages = batch.advantages.copy()
    advantages[np.flatnonzero(batch.mask)[5]] = value
    with pytest.raises(
        SpmdError, match=f"train step 1: the {what} is not finite on rank 0; that optimizer step"
    ):
        trainer.train_step(replace(batch, advantages=advantages), grpo_loss)
    assert all(torch.equal(one, before[name]) for name, one in _weights(trainer).items())
    assert trainer.version() == 1
    assert np.isfinite(trainer.train_step(batch, grpo_loss)["train/loss"])


def test_weights_that_a_failed_step_has_moved_are_another_version(new_trainer) -> None:
    """A minibatch that is not the first may be the one that is not finite."""
    batch, versions = make_batch(), set()
    for sequence in range(6):
        trainer, advantages = new_trainer(minibatches=3), batch.advantages.copy()
        before, first = _weights(trainer), int(batch.lengths[:sequence].sum())
        advantages[first : first + int(batch.lengths[sequence])] = np.nan
        with pytest.raises(SpmdError, match="not finite"):
            trainer.train_step(replace(batch, advantages=advantages), grpo_loss)
        same = all(torch.equal(one, before[name]) for name, one in _weights(trainer).items())
        assert trainer.version() == (0 if same else 1)
        versions.add(trainer.version())
    assert versions == {0, 1}


def test_the_optimizer_writes_in_place(new_trainer) -> None:
    trainer = new_trainer()
    pointers = {name: one.local.data_ptr() for name, one in local_weights(trainer).items()}
    before = _weights(trainer)
    for seed in range(2):
        trainer.train_step(make_batch(seed), grpo_loss)
    after = local_weights(trainer)
    assert {name: one.local.data_ptr() for name, one in after.items()} == pointers
    assert not any(torch.equal(one.local, before[name]) for name, one in after.items())


def test_a_sequence_beyond_the_context_is_named(new_trainer) -> None:
    trainer, batch = new_trainer(), make_batch(longest=200)
    longest, shortest = int(batch.lengths.argmax()), int(batch.lengths.argmin())
    with pytest.raises(
        DataError, match=f"sequence {longest}: {batch.lengths[longest]} tokens .* 160 positions"
    ):
        trainer.train_step(batch.select([shortest, longest]), grpo_loss)


def test_a_rate_given_with_the_step_overrides_the_schedule(new_trainer) -> None:
    trainer = new_trainer(lr=1e-2, warmup_steps=4)
    rates = [
        trainer.train_step(make_batch(), sft_loss, lr=lr)["train/lr"] for lr in (None, 3e-3, None)
    ]
    assert rates == [0.0025, 3e-3, 0.0075]


def test_a_loss_that_sums_by_itself_is_refused_before_the_weights_change(new_trainer) -> None:
    """Else each of its gradients would count as often as there are tokens."""
    trainer = new_trainer()
    before, batch = _weights(trainer), make_batch()
    with pytest.raises(
        ContractError,
        match=rf"returned the loss as the shape \[\]: expected \[{batch.mask.sum()}\]",
    ):
        trainer.train_step(batch, lambda out: (-out.logprobs.sum(), {}))
    for name, one in _weights(trainer).items():
        assert torch.equal(one, before[name])


def _entropy_bonus(out: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss, measured = grpo_loss(out)
    return loss - 0.01 * out.entropy, measured


@pytest.mark.parametrize("options", [{}, {"minibatches": 3}, {"max_tokens": 50, "wrap": "layer"}])
def test_a_loss_that_depends_on_entropy_is_refused_before_the_weights_change(
    new_trainer, options: Any
) -> None:
    """The entropy carries no gradient, so such a bonus would change the printed loss alone."""
    trainer, batch = new_trainer(**options), make_batch()
    before = _weights(trainer)
    with pytest.raises(
        ContractError, match="the loss uses out.entropy, which carries no gradient here"
    ):
        trainer.train_step(batch, _entropy_bonus)
    assert all(torch.equal(one, before[name]) for name, one in _weights(trainer).items())
    plain = new_trainer(**options)
    for one in (trainer, plain):
        one.train_step(batch, grpo_loss)
    for name, one in _weights(trainer).items():
        assert torch.equal(one, _weights(plain)[name])


def test_columns_ride_to_the_loss_by_name(new_trainer) -> None:
    """In every micro-batch the loss finds the rows of its own tokens."""
    seen = []

    def loss(out: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen.append(out.columns["wide"].shape[1])
        torch.testing.assert_close(out.columns["mine"], out.advantages + 1)
        torch.testing.assert_close(out.columns["wide"][:, 1], -out.columns["mine"])
        return grpo_loss(out)

    batch = make_batch()
    mine = np.where(batch.mask, batch.advantages + 1, 0).astype(np.float32)
    batch = batch.with_columns(mine=mine, wide=np.stack([mine, -mine], axis=1))
    new_trainer(max_tokens=60).train_step(batch, loss)
    assert len(seen) > 2


def test_a_column_of_old_logprobs_takes_the_place_of_the_trainers(new_trainer) -> None:
    batch = make_batch()
    old = np.where(batch.mask, -2.5, 0).astype(np.float32)

    def loss(out: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert bool((out.old_logprobs == -2.5).all())
        return grpo_loss(out)

    new_trainer().train_step(batch.with_columns(old_logprobs=old), loss)


def test_entropy_may_be_measured_and_used_as_a_constant(new_trainer) -> None:
    def loss(out: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        per_token, _ = grpo_loss(out)
        unsure = (out.entropy > out.entropy.mean()).float()
        return per_token * (1 + 0 * out.entropy.detach()), {
            "train/unsure": unsure,
            "train/mine": out.entropy,
        }

    trainer, plain, batch = new_trainer(), new_trainer(), make_batch()
    stats, expected = trainer.train_step(batch, loss), plain.train_step(batch, grpo_loss)
    assert stats["train/mine"] == stats["train/entropy"] == expected["train/entropy"]
    assert 0 < stats["train/unsure"] < 1
    for name, one in _weights(trainer).items():
        assert torch.equal(one, _weights(plain)[name])


@pytest.mark.parametrize("peak", [None, 1e12])
def test_mfu_is_told_where_the_peak_is_known(
    new_trainer, monkeypatch: pytest.MonkeyPatch, peak: float | None
) -> None:
    """The model's operations over what the device could do in the time that the tokens took."""
    monkeypatch.setattr(learner, "peak_flops", lambda device, dtype: peak)
    trainer, batch = new_trainer(), make_batch(0)
    stats = trainer.train_step(batch, grpo_loss)
    if peak is None:
        assert "perf/mfu" not in stats
        return
    seconds = batch.num_tokens / stats["perf/train_tokens_per_s"]
    flops = train_flops(read_spec(trainer.model), batch.lengths, int(batch.mask.sum()))
    assert stats["perf/mfu"] == pytest.approx(flops / seconds / peak)

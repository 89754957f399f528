"""The trainer's side of the promise: a token's log-prob bits depend on its sequence and the weights
alone.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spmd_rl.algo.losses import grpo_loss, sft_loss
from spmd_rl.algo.packing import pack_sft
from spmd_rl.kernels import PackedAttention
from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.train.learner import Learner
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from tests.dist.train_case import make_batch
from tests.libraries import other_sums_of_few_rows

ANY = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _scores(trainer: Trainer, batch: Batch, **options: int) -> NDArray[np.float32]:
    return Learner(trainer.backend, trainer.context, replace(trainer.cfg, **options)).score(batch)


def _as_rolled(trainer: Trainer, batch: Batch) -> Batch:
    """The batch as an engine with the trainer's weights would have made it."""
    return replace(batch, rollout_logprobs=_scores(trainer, batch))


@ANY
@given(max_tokens=st.integers(1, 400), order=st.permutations(range(18)))
def test_bits_do_not_depend_on_micro_batches_or_order(
    new_trainer, max_tokens: int, order: list[int]
) -> None:
    trainer, batch = new_trainer(), make_batch()
    expected = _scores(trainer, batch)
    np.testing.assert_array_equal(_scores(trainer, batch, max_tokens=max_tokens), expected)
    moved = np.split(
        _scores(trainer, batch.select(order), max_tokens=max_tokens),
        np.cumsum(batch.lengths[order])[:-1],
    )
    back = np.concatenate([moved[i] for i in np.argsort(order)])
    np.testing.assert_array_equal(back.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 40},
        {"recompute": "cheap"},
        {"recompute": "all"},
        {"logit_rows": 7},
        {"wrap": "layer"},
        {"wrap": "layer", "recompute": "all", "logit_rows": 16, "max_tokens": 64},
        {"minibatches": 3},
    ],
)
def test_the_training_forward_has_the_scoring_bits(new_trainer, options: dict[str, object]) -> None:
    batch = _as_rolled(new_trainer(), make_batch())
    stats = new_trainer(**options).train_step(batch, grpo_loss)
    assert stats["onpolicy/mismatched_tokens"] == 0
    assert stats["onpolicy/compared_tokens"] == batch.mask.sum()
    distances = {
        stats[f"onpolicy/{name}"]
        for name in ("max_abs_dlogp", "mean_abs_dlogp", "k1", "k3", "chi2")
    }
    assert (distances, stats["onpolicy/ess"]) == ({0.0}, 1.0)


def test_distances_are_those_of_float64(new_trainer) -> None:
    """For an engine whose log-probs are other numbers, as another library's are."""
    trainer, rng = new_trainer(), np.random.default_rng(0)
    batch = _as_rolled(trainer, make_batch())
    there = np.flatnonzero(batch.mask)
    exact = batch.rollout_logprobs[there].astype(np.float64)
    batch.rollout_logprobs[there] += rng.normal(0, 0.3, len(there)).astype(np.float32)
    stats = trainer.train_step(batch, grpo_loss)
    d = exact - batch.rollout_logprobs[there]
    expected = {
        "max_abs_dlogp": np.abs(d).max(),
        "mean_abs_dlogp": np.abs(d).mean(),
        "k1": -d.mean(),
        "k3": (np.exp(d) - 1 - d).mean(),
        "chi2": (np.exp(d) ** 2).mean() - 1,
        "ess": np.exp(d).sum() ** 2 / (np.exp(d) ** 2).sum() / len(d),
    }
    assert {name: stats[f"onpolicy/{name}"] for name in expected} == pytest.approx(
        expected, rel=1e-4
    )
    assert stats["onpolicy/mismatched_tokens"] == len(d)


def test_one_flipped_bit_is_counted(new_trainer) -> None:
    trainer = new_trainer()
    batch = _as_rolled(trainer, make_batch())
    batch.rollout_logprobs.view(np.int32)[np.flatnonzero(batch.mask)[[3, 8]]] ^= 1
    stats = trainer.train_step(batch, grpo_loss)
    assert stats["onpolicy/mismatched_tokens"] == 2
    assert 0 < stats["onpolicy/max_abs_dlogp"] < 1e-5


def test_only_tokens_of_the_current_version_are_compared(new_trainer) -> None:
    trainer = new_trainer()
    batch = _as_rolled(trainer, make_batch())
    first = trainer.train_step(batch, grpo_loss)
    again = trainer.train_step(batch, grpo_loss)
    assert first["onpolicy/compared_tokens"] == batch.mask.sum()
    assert again["onpolicy/compared_tokens"] == 0
    stale = trainer.train_step(
        replace(batch, versions=np.where(batch.mask, 2, -1).astype(np.int32)), grpo_loss
    )
    assert stale["onpolicy/mismatched_tokens"] > 0.9 * batch.mask.sum()


def test_nothing_is_said_of_an_engine_where_none_made_a_token(new_trainer) -> None:
    pairs = [(np.array([5, 6, 7], np.int32), np.array([False, True, True]))] * 2
    batch = pack_sft(pairs)
    stats = new_trainer().train_step(batch, sft_loss)
    assert not [name for name in stats if name.startswith("onpolicy/")]
    assert stats["train/tokens"] == batch.num_tokens == 6


def test_the_number_of_the_last_push_is_the_one_compared(new_trainer) -> None:
    """A supervised warm-up raises the version; the engine's tokens still carry the number they were
    pushed under.
    """
    trainer = new_trainer()
    for seed in range(3):
        trainer.train_step(make_batch(seed), sft_loss)
    batch = _as_rolled(trainer, make_batch(version=0))
    trainer.on_weights_pushed(0)
    stats = trainer.train_step(batch, grpo_loss)
    assert (stats["onpolicy/compared_tokens"], stats["onpolicy/mismatched_tokens"]) == (
        batch.mask.sum(),
        0,
    )
    assert trainer.version() == 1


def test_without_padding_to_the_row_tile_bits_differ(
    new_trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: if this passes bit for bit, the tests above prove nothing."""
    trainer, batch = new_trainer(), make_batch()
    monkeypatch.setattr(torch.nn.functional, "linear", other_sums_of_few_rows)
    expected = _scores(trainer, batch)
    trainer.backend.scorer.logit_rows = 1
    np.testing.assert_array_equal(_scores(trainer, batch), expected)
    monkeypatch.setattr(sys.modules["spmd_rl.kernels.linear.cpu"], "pad_rows", lambda x: x)
    alone = _scores(trainer, batch)
    assert np.allclose(alone, expected, atol=1e-4)
    assert not np.array_equal(alone.view(np.int32), expected.view(np.int32))


def test_scores_are_the_log_softmax(new_trainer) -> None:
    trainer, batch = new_trainer(), make_batch()
    scores = _scores(trainer, batch)
    spec = read_spec(trainer.model)
    model = CausalLM(spec)
    model.load_state_dict(dict(random_weights(spec, trainer.cfg.seed)))
    starts = np.cumsum(batch.lengths) - batch.lengths
    for i, start in enumerate(starts):
        tokens = torch.from_numpy(batch.tokens[start : start + batch.lengths[i]]).long()
        attend = PackedAttention(batch.lengths[[i]], device=tokens.device)
        with torch.no_grad():
            logits = model(tokens, torch.arange(len(tokens)), attend, torch.arange(len(tokens) - 1))
        temperature = batch.temperature[i] or 1.0
        expected = (
            (logits.double() / temperature).log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        )
        mask = batch.mask[start + 1 : start + batch.lengths[i]]
        own = scores[start + 1 : start + batch.lengths[i]]
        np.testing.assert_allclose(own[mask], expected.numpy()[mask], rtol=1e-5, atol=1e-5)

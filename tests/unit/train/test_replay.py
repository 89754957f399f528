"""Filters that are replayed: a trainer computes the engine's log-probs over what they kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.algo.advantages import group_advantage
from spmd_rl.algo.losses import grpo_loss
from spmd_rl.algo.packing import pack
from spmd_rl.errors import ContractError
from spmd_rl.kernels import PackedAttention
from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.model.scorer import Scorer
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.train.microbatch import lay_out
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group
from spmd_rl.types.kept_sets import decode_sets, encode_sets
from spmd_rl.types.prompts import Prompt
from tests.dist.train_case import VOCAB
from tests.samples import finish

CPU = torch.device("cpu")
MISMATCHED, COMPARED = "onpolicy/mismatched_tokens", "onpolicy/compared_tokens"
SHAPE = SamplingConfig(num_samples=3, max_tokens=24, ignore_eos=True)
FILTERS = {
    "top-k": [replace(SHAPE, top_k=7)],
    "top-p": [replace(SHAPE, top_p=0.8, temperature=0.7)],
    "min-p": [replace(SHAPE, min_p=0.1)],
    "all of them": [replace(SHAPE, top_k=20, top_p=0.9, min_p=0.02, temperature=1.3)],
    "mixed rows": [
        SHAPE,
        replace(SHAPE, top_k=1),
        replace(SHAPE, top_p=0.5),
        replace(SHAPE, temperature=0.0, top_k=3),
        replace(SHAPE, min_p=0.3, temperature=2.0),
        replace(SHAPE, top_p=0.999999),
    ],
}


def rollout(trainer: Trainer, samplings: Sequence[SamplingConfig]) -> list[Group]:
    """Groups of an engine with the trainer's weights; each prompt has the next sampling."""
    cfg = NativeEngineConfig(max_batch=9, max_step_tokens=32)
    engine = NativeEngine(new_model(trainer).requires_grad_(False), cfg, CPU)
    engine.sink().commit(0)
    rng = np.random.default_rng(3)
    prompts = [
        Prompt(uid, rng.integers(0, VOCAB, 2 + 3 * uid).astype(np.int32)) for uid in range(6)
    ]
    requests = [
        Request(prompt.uid, index, prompt.tokens, samplings[prompt.uid % len(samplings)], seed=1)
        for prompt in prompts
        for index in range(SHAPE.num_samples)
    ]
    drawn = finish(engine, requests)
    return [
        Group(
            prompt,
            [
                drawn[prompt.uid, index].replace(reward=float(index))
                for index in range(SHAPE.num_samples)
            ],
        )
        for prompt in prompts
    ]


def packed(trainer: Trainer, samplings: Sequence[SamplingConfig]) -> Batch:
    groups = rollout(trainer, samplings)
    return pack(groups, group_advantage(groups))


@pytest.mark.parametrize("samplings", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize(
    "options", [{}, {"minibatches": 3, "max_tokens": 60, "logit_rows": 13, "recompute": "all"}]
)
def test_no_token_of_a_filtered_rollout_is_mismatched(
    new_trainer, samplings: list[SamplingConfig], options: dict[str, object]
) -> None:
    trainer = new_trainer(**options)
    batch = packed(trainer, samplings)
    metrics = trainer.train_step(batch, grpo_loss)
    assert (metrics[MISMATCHED], metrics[COMPARED]) == (0, batch.mask.sum())
    assert metrics["onpolicy/max_abs_dlogp"] == 0


def bits_of(kept: NDArray[np.uint8]) -> NDArray[np.bool_]:
    counts, ids = decode_sets(kept)
    bits = np.zeros((len(counts), VOCAB), np.bool_)
    bits[np.repeat(np.arange(len(counts)), counts), ids] = True
    return bits


def with_one_more(kept: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return sets that have one more token each, the lowest that was left out."""
    bits = bits_of(kept)
    bits[np.arange(len(bits)), np.argmin(bits, axis=1)] = True
    return np.frombuffer(b"".join(encode_sets(bits)), np.uint8)


def test_control_another_set_is_seen(new_trainer) -> None:
    batch = packed(new_trainer(), FILTERS["top-k"])
    without = new_trainer().train_step(replace(batch, kept=[]), grpo_loss)
    assert without[MISMATCHED] == without[COMPARED]
    wider = new_trainer().train_step(
        replace(batch, kept=[with_one_more(one) for one in batch.kept]), grpo_loss
    )
    assert wider[MISMATCHED] > 0.9 * wider[COMPARED]


def test_without_replay_log_probs_are_those_over_all_tokens(new_trainer) -> None:
    trainer = new_trainer()
    plain = [replace(one, replay_filters=False) for one in FILTERS["top-p"]]
    batch, replayed = packed(trainer, plain), packed(trainer, FILTERS["top-p"])
    assert batch.kept == []
    np.testing.assert_array_equal(batch.tokens, replayed.tokens)
    there = batch.mask
    assert (batch.rollout_logprobs[there] <= replayed.rollout_logprobs[there]).all()
    assert (batch.rollout_logprobs[there] < replayed.rollout_logprobs[there]).any()
    assert trainer.train_step(batch, grpo_loss)[MISMATCHED] == 0


def new_model(trainer: Trainer) -> CausalLM:
    spec = read_spec(trainer.model)
    model = CausalLM(spec)
    model.load_state_dict(dict(random_weights(spec, trainer.cfg.seed)))
    return model


def kept_by(groups: Sequence[Group]) -> Tensor:
    """Which tokens were left for each drawn token, from what the samples carry."""
    samples = [sample for group in groups for sample in group.samples]
    blobs = [sample.kept or bytes(len(sample.tokens)) for sample in samples]
    bits = bits_of(np.frombuffer(b"".join(blobs), np.uint8))
    bits[~bits.any(1)] = True
    return torch.from_numpy(bits)


def test_log_probs_and_gradients_are_those_of_a_float64_masked_softmax(new_trainer) -> None:
    trainer = new_trainer()
    groups = rollout(trainer, FILTERS["mixed rows"])
    batch = pack(groups, group_advantage(groups))
    kept, micro, model = kept_by(groups), lay_out(batch, CPU), new_model(trainer)
    factor = torch.randn(len(kept), generator=torch.Generator().manual_seed(0))
    scored = Scorer(model, 1000, recomputes=False)(micro).logprobs
    (scored * factor).sum().backward()
    gradients = [parameter.grad.double() for parameter in model.parameters()]
    model.zero_grad()
    attend = PackedAttention(
        micro.lengths,
        device=CPU,
        prefixes=micro.prefixes,
    )
    logits = model(micro.tokens, micro.positions, attend, micro.rows).double()
    scores = logits * micro.inv_temperature.double().unsqueeze(1)
    masked = scores.masked_fill(~kept, -torch.inf).log_softmax(1)
    expected = masked.gather(1, micro.targets.unsqueeze(1)).squeeze(1)
    (expected * factor).sum().backward()
    recorded = torch.from_numpy(batch.rollout_logprobs[batch.mask])
    assert torch.equal(scored, recorded)
    torch.testing.assert_close(recorded.double(), expected, rtol=1e-5, atol=1e-5)
    for own, parameter in zip(gradients, model.parameters(), strict=True):
        assert (own - parameter.grad).norm() < 2e-5 * parameter.grad.double().norm()
    unmasked = scores.log_softmax(1).gather(1, micro.targets.unsqueeze(1)).squeeze(1)
    assert (expected - unmasked).abs().max() > 0.1


def test_a_set_for_too_few_tokens_is_refused(new_trainer) -> None:
    batch = packed(new_trainer(), FILTERS["top-k"])
    first, *rest = batch.kept
    short = replace(batch, kept=[first[int(np.argmax(first == 0)) + 1 :], *rest])
    assert lay_out(batch, CPU).kept is not None
    with pytest.raises(ContractError, match=r"Batch\.kept needs a set for each token"):
        lay_out(short, CPU)

"""Mixtures in recorded graphs: the samples and routes of single steps, and of the trainer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from spmd_rl.kernels import PackedAttention, token_logprobs
from spmd_rl.kernels.moe.route_hash import ROUTES, hashed_routes
from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.engine import Request
from spmd_rl.types.routes import EXPERT_IDS
from tests.gpu.rollout.graph_case import (
    DEVICE,
    SPEC,
    USUAL,
    inverse_temperatures,
    new_engine,
    unequal,
    workload,
)
from tests.samples import Samples, finish, words_of
from tests.specs import with_experts

MIXTURE = with_experts(SPEC, 32, 4, 192)


@pytest.fixture(scope="module")
def mixture() -> CausalLM:
    model = CausalLM(MIXTURE)
    model.load_state_dict(dict(random_weights(MIXTURE, 0)))
    return model.to(DEVICE, torch.bfloat16).requires_grad_(False)


@pytest.fixture(scope="module")
def single(mixture: CausalLM) -> Samples:
    return finish(new_engine(mixture, replace(USUAL, cuda_graphs=False, max_batch=2)), workload())


@pytest.mark.parametrize("max_batch", [5, 24, 64])
def test_graphs_give_the_samples_and_routes_of_single_steps(
    mixture: CausalLM, single: Samples, max_batch: int
) -> None:
    engine = new_engine(mixture, replace(USUAL, max_batch=max_batch))
    found = finish(engine, workload())
    assert engine.stats()["num_graphs"] > 2
    assert unequal(found, single) == 0
    for name, sample in found.items():
        assert np.array_equal(sample.columns[ROUTES], single[name].columns[ROUTES]), name


def recording(requests: list[Request]) -> list[Request]:
    return [
        Request(
            one.uid, one.index, one.prompt, replace(one.sampling, replay_routes=True), seed=one.seed
        )
        for one in requests
    ]


@pytest.mark.parametrize("max_batch", [5, 24])
def test_recorded_routes_are_those_of_single_steps(
    mixture: CausalLM, single: Samples, max_batch: int
) -> None:
    """Graphs record them too, and no sample changes by it."""
    plain = replace(USUAL, cuda_graphs=False, max_batch=2, prefix_cache=False)
    expected = finish(new_engine(mixture, plain), recording(workload()))
    assert unequal(expected, single) == 0
    engine = new_engine(mixture, replace(USUAL, max_batch=max_batch))
    for turn in range(2):  # in the second one, prompts are in the cache
        found = finish(engine, recording(workload()))
        for name, sample in found.items():
            wanted = expected[name]
            assert np.array_equal(sample.columns[EXPERT_IDS], wanted.columns[EXPERT_IDS]), name
            assert sample.prompt_routes == wanted.prompt_routes, (turn, name)
            assert len(sample.prompt_routes) > 0
        assert unequal(found, single) == 0


def test_the_trainers_pass_has_the_same_bits_and_routes(mixture: CausalLM, single: Samples) -> None:
    """Gradients are enabled, so the trainer's kernels run."""
    for one in mixture.parameters():
        one.requires_grad_()
    try:
        for request in workload()[::3]:
            sample = single[request.uid, request.index]
            whole = np.concatenate([request.prompt, sample.tokens]).astype(np.int64)
            tokens = torch.from_numpy(whole).to(DEVICE)
            first = len(request.prompt) - 1
            rows = torch.arange(first, len(whole) - 1, device=DEVICE)
            attend = PackedAttention(np.array([len(whole)], dtype=np.int32), device=DEVICE)
            with hashed_routes() as hashed:
                positions = torch.arange(len(whole), device=DEVICE)
                logits = mixture(tokens, positions, attend, rows)
            words = words_of([sample], MIXTURE.vocab_size, DEVICE)
            inverse = inverse_temperatures(sample)
            scored, _ = token_logprobs(logits, tokens[first + 1 :], inverse, words)
            assert torch.equal(scored.detach().cpu(), torch.from_numpy(sample.logprobs))
            routes = hashed.of_rows(rows)
            assert routes is not None
            assert np.array_equal(routes.cpu().numpy(), sample.columns[ROUTES])
    finally:
        mixture.requires_grad_(False)


def test_control_a_flipped_route_is_seen(mixture: CausalLM, single: Samples) -> None:
    """The negative control: with another router, samples and routes differ."""
    gate = dict(mixture.named_parameters())["model.layers.1.mlp.gate.weight"]
    with torch.no_grad():
        gate.copy_(gate.roll(1, 0))
    try:
        found = finish(new_engine(mixture), workload())
    finally:
        with torch.no_grad():
            gate.copy_(gate.roll(-1, 0))
    assert unequal(found, single) > 0

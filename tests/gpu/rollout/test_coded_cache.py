"""An engine with keys and values in 8 bits on a GPU: samples of any schedule, with the log-probs of
a training forward.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from spmd_rl.kernels import PackedAttention, token_logprobs
from spmd_rl.kernels.attention.flash_backend import FlashAttention
from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
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

EXPONENTS = (0, -1)
CODED = replace(USUAL, cache="e4m3", cache_exponents=EXPONENTS)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    model = CausalLM(SPEC, exponents=EXPONENTS)
    model.load_state_dict(dict(random_weights(SPEC, 0)))
    return model.to(DEVICE, torch.bfloat16).requires_grad_(False)


@pytest.fixture(scope="module")
def drawn(model: CausalLM) -> Samples:
    return finish(new_engine(model, CODED), workload())


def test_any_schedule_draws_the_same_samples(model: CausalLM, drawn: Samples) -> None:
    tight = replace(CODED, max_batch=3, max_step_tokens=64, num_pages=24, prefix_cache=False)
    assert unequal(finish(new_engine(model, tight), workload()), drawn) == 0


def test_recorded_steps_draw_what_others_do(
    model: CausalLM, drawn: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that reads codes draws what the decoded copy does."""
    stats = []
    for reads, recorded in ((True, True), (True, False), (False, False)):
        monkeypatch.setattr(FlashAttention, "reads_codes", reads)
        engine = new_engine(model, replace(CODED, cuda_graphs=recorded))
        assert unequal(finish(engine, workload()), drawn) == 0
        stats.append(engine.stats())
    assert stats[0]["num_graphs"] > 0 == stats[1]["num_graphs"] == stats[2]["num_graphs"]
    assert all(one["num_coded"] > one["num_clipped"] == 0 for one in stats)


def mismatched(model: CausalLM, drawn: Samples, exponents: tuple[int, int] | None) -> int:
    """Count the samples whose log-probs are not those of a training forward."""
    found = 0
    for request in workload():
        sample = drawn[request.uid, request.index]
        tokens = torch.from_numpy(np.concatenate([request.prompt, sample.tokens])).long().to(DEVICE)
        attend = PackedAttention(np.array([len(tokens)]), device=DEVICE, exponents=exponents)
        scored = torch.arange(len(request.prompt) - 1, len(tokens) - 1, device=DEVICE)
        logits = model(tokens, torch.arange(len(tokens), device=DEVICE), attend, scored)
        words = words_of([sample], SPEC.vocab_size, DEVICE)
        inverse = inverse_temperatures(sample)
        logprobs, _ = token_logprobs(logits, tokens[scored + 1], inverse, words)
        found += logprobs.cpu().numpy().tobytes() != sample.logprobs.tobytes()
    return found


def test_log_probs_are_those_of_a_training_forward(model: CausalLM, drawn: Samples) -> None:
    assert mismatched(model, drawn, EXPONENTS) == 0
    assert mismatched(model, drawn, (0, 3)) > 0
    assert mismatched(model, drawn, None) > 0

"""Layers with states in recorded graphs: the samples of single steps, and the trainer's bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from spmd_rl.kernels import KvCache, PackedAttention, token_logprobs
from spmd_rl.model.hf import random_weights
from spmd_rl.model.layers.delta import GatedDelta
from spmd_rl.model.layers.gqa import Gqa
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec
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

DELTA = GatedDelta(512, 4, 8, key_head_dim=128, value_head_dim=128, conv_size=4, rms_eps=1e-6)


def hybrid_spec(head_dim: int = 64) -> ModelSpec:
    """Two layers with a state, around a gated one of attention; norms are zero-centred."""
    blocks = []
    for number, block in enumerate(SPEC.blocks):
        mixer = block.mixer
        assert isinstance(mixer, Gqa)
        gated = replace(mixer, gated=True, zero_centred=True, head_dim=head_dim)
        blocks.append(replace(block, mixer=gated if number == 1 else DELTA, zero_centred=True))
    return replace(SPEC, blocks=tuple(blocks))


def new_hybrid(spec: ModelSpec) -> CausalLM:
    model = CausalLM(spec)
    model.load_state_dict(dict(random_weights(spec, 0)))
    return model.to(DEVICE, torch.bfloat16).requires_grad_(False)


@pytest.fixture(scope="module")
def hybrid() -> CausalLM:
    return new_hybrid(hybrid_spec())


@pytest.fixture(scope="module")
def single(hybrid: CausalLM) -> Samples:
    plain = replace(USUAL, cuda_graphs=False, max_batch=2, prefix_cache=False)
    return finish(new_engine(hybrid, plain), workload())


@pytest.mark.parametrize("max_batch", [5, 24, 64])
def test_graphs_give_the_samples_of_single_steps(
    hybrid: CausalLM, single: Samples, max_batch: int
) -> None:
    """Also from snapshots, and with few pages."""
    engine = new_engine(hybrid, replace(USUAL, max_batch=max_batch, num_pages=30))
    for _ in range(2):
        assert unequal(finish(engine, workload()), single) == 0
    stats = engine.stats()
    assert stats["num_graphs"] > 2 and stats["num_hit_tokens"] > 0
    assert stats["num_copied_tails"] > 0


def mismatched(model: CausalLM, samples: Samples) -> tuple[int, int]:
    """How many tokens have other bits in the trainer's pass, of how many."""
    bad = total = 0
    for request in workload()[::3]:
        sample = samples[request.uid, request.index]
        whole = np.concatenate([request.prompt, sample.tokens]).astype(np.int64)
        tokens = torch.from_numpy(whole).to(DEVICE)
        first = len(request.prompt) - 1
        rows = torch.arange(first, len(whole) - 1, device=DEVICE)
        attend = PackedAttention(np.array([len(whole)], dtype=np.int32), device=DEVICE)
        logits = model(tokens, torch.arange(len(whole), device=DEVICE), attend, rows)
        words = words_of([sample], SPEC.vocab_size, DEVICE)
        scored, _ = token_logprobs(logits, tokens[first + 1 :], inverse_temperatures(sample), words)
        bad += int((scored.detach().cpu() != torch.from_numpy(sample.logprobs)).sum())
        total += len(sample.tokens)
    return bad, total


def test_the_trainers_pass_has_the_same_bits(hybrid: CausalLM, single: Samples) -> None:
    """Gradients are enabled, so the trainer's kernels run."""
    for one in hybrid.parameters():
        one.requires_grad_()
    try:
        bad, total = mismatched(hybrid, single)
        assert total > 500 and bad == 0
    finally:
        hybrid.requires_grad_(False)


def test_heads_of_256_have_the_same_bits() -> None:
    """In pages of 64 tokens; a quarter of each head is rotated."""
    model = new_hybrid(hybrid_spec(256))
    engine = new_engine(model, replace(USUAL, num_pages=60, page_size=64))
    samples = finish(engine, workload())
    assert engine.stats()["num_graphs"] > 0 and engine.stats()["num_hit_tokens"] > 0
    bad, total = mismatched(model, samples)
    assert total > 500 and bad == 0


def test_control_states_that_are_not_copied_are_seen(
    hybrid: CausalLM, single: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvCache, "copy_states", lambda self, sources, targets: None)
    assert unequal(finish(new_engine(hybrid), workload()), single) > 0


def test_control_a_state_in_bfloat16_is_seen(
    hybrid: CausalLM, single: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that rounds its states between steps has other bits than the trainer."""
    engine = new_engine(hybrid, replace(USUAL, cuda_graphs=False))
    arrays, step = engine._runner.cache.states, engine.step

    def rounding():
        output = step()
        for heads in (layer[1] for layer in arrays if layer):
            heads.copy_(heads.bfloat16())
        return output

    monkeypatch.setattr(engine, "step", rounding)
    bad, _ = mismatched(hybrid, finish(engine, workload()))
    assert bad > 0

"""Attention to latents in recorded graphs: the samples of single steps, and the trainer's bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spmd_rl.kernels import KvCache
from spmd_rl.model.hf import random_weights
from spmd_rl.model.layers.mla import Mla
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.sigmoid_router import SigmoidRouter
from spmd_rl.model.network import CausalLM
from spmd_rl.model.rope_spec import RopeSpec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.engine import Request
from tests.gpu.rollout.graph_case import DEVICE, SPEC, USUAL, new_engine, unequal, workload
from tests.gpu.rollout.test_states import mismatched
from tests.samples import Samples, finish

CONFIG = replace(USUAL, page_size=64)


def latent_spec(query_rank: int = 0) -> ModelSpec:
    """Three layers with keys of the published size; the last two have experts."""
    hidden = SPEC.hidden_size
    mixer = Mla(
        hidden,
        num_heads=8,
        latent_dim=512,
        query_rank=query_rank,
        plain_dim=128,
        rotary_dim=64,
        value_dim=128,
        scale=192**-0.5,
        interleaved=True,
        bias=False,
    )
    moe = Moe(hidden, 32, 4, 192, shared_size=384, sigmoid=SigmoidRouter(4, 2, 2.446))
    blocks = [
        replace(block, mixer=mixer, mlp=moe if number else block.mlp)
        for number, block in enumerate(SPEC.blocks)
    ]
    return replace(SPEC, blocks=tuple(blocks), rope=RopeSpec(64, 5e4))


def new_model(spec: ModelSpec) -> CausalLM:
    model = CausalLM(spec)
    model.load_state_dict(dict(random_weights(spec, 0)))
    return model.to(DEVICE, torch.bfloat16).requires_grad_(False)


@pytest.fixture(scope="module", params=[0, 256], ids=["as Moonlight", "as DeepSeek-V3"])
def latents(request: pytest.FixtureRequest) -> CausalLM:
    return new_model(latent_spec(request.param))


@pytest.fixture(scope="module")
def single(latents: CausalLM) -> Samples:
    plain = replace(CONFIG, cuda_graphs=False, max_batch=2, prefix_cache=False)
    return finish(new_engine(latents, plain), workload())


@pytest.mark.parametrize("max_batch", [5, 24, 64])
def test_graphs_give_the_samples_of_single_steps(
    latents: CausalLM, single: Samples, max_batch: int
) -> None:
    """Also from prefixes and after forks, with few pages."""
    engine = new_engine(latents, replace(CONFIG, max_batch=max_batch, num_pages=60))
    for _ in range(2):
        assert unequal(finish(engine, workload()), single) == 0
    stats = engine.stats()
    assert stats["num_graphs"] > 2 and stats["num_hit_tokens"] > 0
    assert stats["num_copied_tails"] > 0


def test_preemption_changes_nothing(latents: CausalLM) -> None:
    requests = [
        Request(
            one.uid,
            one.index,
            one.prompt,
            replace(one.sampling, max_tokens=200, stop_ids=()),
            seed=one.seed,
        )
        for one in workload()[:16]
    ]
    few = new_engine(latents, replace(CONFIG, num_pages=18, prefix_cache=False))
    found = finish(few, requests)
    assert few.stats()["num_preemptions"] > 0
    assert unequal(found, finish(new_engine(latents, CONFIG), requests)) == 0


def test_the_trainers_pass_has_the_same_bits(latents: CausalLM, single: Samples) -> None:
    """Gradients are enabled, so the trainer's kernels run."""
    for one in latents.parameters():
        one.requires_grad_()
    try:
        bad, total = mismatched(latents, single)
        assert total > 500 and bad == 0
    finally:
        latents.requires_grad_(False)


def test_a_token_takes_1152_bytes_of_a_layer(latents: CausalLM) -> None:
    cache = new_engine(latents, CONFIG)._runner.cache
    assert cache.num_bytes == 3 * cache.num_pages * 64 * 1152


def test_control_tails_that_are_not_copied_are_seen(
    latents: CausalLM, single: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvCache, "copy_pages", lambda self, sources, targets: None)
    assert unequal(finish(new_engine(latents, CONFIG), workload()), single) > 0

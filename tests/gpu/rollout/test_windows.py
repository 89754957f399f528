"""Windows, sinks and experts with biases in recorded graphs: the samples of single steps, and the
trainer's bits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spmd_rl.kernels import KvCache
from spmd_rl.kernels.attention.flash import flash_supports
from spmd_rl.model.hf import random_weights
from spmd_rl.model.layers.gqa import Gqa
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec
from tests.gpu.rollout.graph_case import DEVICE, SPEC, USUAL, new_engine, unequal, workload
from tests.gpu.rollout.test_states import mismatched
from tests.samples import Samples, finish

WINDOW = 128


@pytest.fixture(autouse=True)
def _needs_flash() -> None:
    if not flash_supports(64, torch.bfloat16, DEVICE):
        pytest.skip("needs FlashAttention-4 on a Hopper GPU")


def windows_spec() -> ModelSpec:
    """Three layers, the first and the last in windows, with sinks, and experts with biases."""
    moe = Moe(SPEC.hidden_size, 32, 4, 192, biases=True, limit=7.0)
    blocks = []
    for number, block in enumerate(SPEC.blocks):
        assert isinstance(block.mixer, Gqa)
        window = 0 if number % 2 else WINDOW
        mixer = replace(
            block.mixer, window=window, has_sinks=True, qk_norm=False, qkv_bias=True, out_bias=True
        )
        blocks.append(replace(block, mixer=mixer, mlp=moe))
    return replace(SPEC, blocks=tuple(blocks))


@pytest.fixture(scope="module")
def model() -> CausalLM:
    model = CausalLM(windows_spec())
    model.load_state_dict(dict(random_weights(model.spec, 0)))
    for name, one in model.named_parameters():
        if name.endswith(("sinks", "bias")):
            torch.nn.init.normal_(one, std=0.3)
    return model.to(DEVICE, torch.bfloat16).requires_grad_(False)


@pytest.fixture(scope="module")
def single(model: CausalLM) -> Samples:
    plain = replace(USUAL, cuda_graphs=False, max_batch=2, prefix_cache=False)
    return finish(new_engine(model, plain), workload())


@pytest.mark.parametrize("max_batch", [5, 24, 64])
def test_graphs_give_the_samples_of_single_steps(
    model: CausalLM, single: Samples, max_batch: int
) -> None:
    """Also from prefixes and after forks, with few pages."""
    engine = new_engine(model, replace(USUAL, max_batch=max_batch, num_pages=60))
    for _ in range(2):
        assert unequal(finish(engine, workload()), single) == 0
    stats = engine.stats()
    assert stats["num_graphs"] > 2 and stats["num_hit_tokens"] > 0


def test_the_trainers_pass_has_the_same_bits(model: CausalLM, single: Samples) -> None:
    """Gradients are enabled, so the trainer's kernels run."""
    for one in model.parameters():
        one.requires_grad_()
    try:
        bad, total = mismatched(model, single)
        assert total > 500 and bad == 0
    finally:
        model.requires_grad_(False)


def test_control_tails_that_are_not_copied_are_seen(
    model: CausalLM, single: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvCache, "copy_pages", lambda self, sources, targets: None)
    assert unequal(finish(new_engine(model, USUAL), workload()), single) > 0

"""What a layer keeps on a GPU for the backward pass, beside the arithmetic of the plan."""

from __future__ import annotations

import gc
import json
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.shapes import config
from spmd_rl.kernels import PackedAttention, recomputing
from spmd_rl.kernels.attention.flash import flash_supports
from spmd_rl.model.layers.layer import Recompute
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import ModelSpec
from tests.specs import attention_of

DEVICE, TOKENS = torch.device("cuda"), 4096


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("model")
    shape = config("0.6B") | {"num_hidden_layers": 6, "vocab_size": 1024}
    (folder / "config.json").write_text(json.dumps(shape))
    return read_spec(folder)


def kept_bytes(spec: ModelSpec, num_layers: int, recompute: Recompute) -> int:
    """Memory that is allocated between a forward pass of some layers and its backward pass."""
    with torch.device(DEVICE):
        model = CausalLM(spec).bfloat16()
    layers = model.model.layers[:num_layers]
    model.model.layers = layers
    for layer in layers:
        if recompute == "cheap":
            layer.forward = recomputing()(layer.forward)
        elif recompute == "all":
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    attend = PackedAttention(
        np.array([TOKENS], np.int32),
        device=DEVICE,
    )
    tokens = torch.zeros(TOKENS, dtype=torch.int64, device=DEVICE)
    positions = torch.arange(TOKENS, device=DEVICE)
    model(tokens, positions, attend).sum().backward()  # tables are made, kernels are compiled
    model.zero_grad(set_to_none=True)
    gc.collect()  # earlier models, whose layers refer to themselves, do not go in between
    before = torch.cuda.memory_allocated()
    hidden = model(tokens, positions, attend)
    kept = torch.cuda.memory_allocated() - before
    hidden.sum().backward()
    return kept


@pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
def test_a_layer_keeps_what_the_plan_counts(spec: ModelSpec, recompute: Recompute) -> None:
    """Of four more layers, so that what belongs to none cancels. The plan leaves out statistics of
    rows, which are fp32 and one or one a head.
    """
    if not flash_supports(attention_of(spec).head_dim, torch.bfloat16, DEVICE):
        pytest.skip("needs FlashAttention-4 on a Hopper GPU")
    measured = (kept_bytes(spec, 6, recompute) - kept_bytes(spec, 2, recompute)) / 4
    planned = spec.blocks[0].cost().kept(recompute) * TOKENS * 2
    assert 0.97 <= planned / measured <= 1.01

"""The gated delta layer beside transformers' own, and its bits in packs and pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from spmd_rl.errors import ConfigError
from spmd_rl.kernels import KvCache, PackedAttention, PagedAttention, Rotary
from spmd_rl.model.layers.delta import GatedDelta
from spmd_rl.model.parts.part import check_parts
from tests.specs import dense_spec

CPU = torch.device("cpu")
HIDDEN, NO_ROTARY = 48, Rotary(torch.empty(0), torch.empty(0), torch.empty(0))
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"],
    "num_hidden_layers": 1,
}
KINDS = {
    False: (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet),
    True: (Qwen3NextConfig, Qwen3NextGatedDeltaNet),
}


def spec(fused: bool) -> GatedDelta:
    return GatedDelta(HIDDEN, 2, 6, 16, 8, 4, 1e-6, fused=fused)


def drawn(module: nn.Module) -> nn.Module:
    """The module with weights that are a function of their names' order."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, one in sorted(module.named_parameters()):
            one.copy_(torch.randn(one.shape, generator=generator) * 0.3)
    return module


def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def packed(mixer: nn.Module, x: Tensor, lengths: list[int]) -> Tensor:
    return mixer(x, NO_ROTARY, PackedAttention(np.array(lengths), device=CPU))


@pytest.mark.parametrize("fused", [False, True])
def test_it_is_transformers_layer(fused: bool) -> None:
    kind, layer = KINDS[fused]
    theirs, ours = drawn(layer(kind(**SIZES), 0)), drawn(spec(fused).module(0))
    xs = [rows(70).requires_grad_() for _ in range(2)]
    out, expected = packed(ours, xs[0], [70]), theirs(xs[1][None])[0]
    assert (out - expected).norm() <= 2e-5 * expected.norm()
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(grad)
    expected.backward(grad)
    others = dict(theirs.named_parameters()) | {"x": xs[1]}
    mine = dict(ours.named_parameters()) | {"x": xs[0]}
    assert mine.keys() == others.keys()
    for name, one in mine.items():
        difference = (one.grad - others[name].grad).norm()
        assert difference <= 2e-5 * others[name].grad.norm(), name


@pytest.mark.parametrize("fused", [False, True])
def test_the_specification_is_the_modules(fused: bool) -> None:
    mixer = spec(fused).module(0)
    shapes = {f"linear_attn.{name}": tuple(one.shape) for name, one in mixer.named_parameters()}
    assert {one.name: one.shape for one in spec(fused).parameters()} == shapes
    modules = {f"linear_attn.{name}" for name, _ in mixer.named_modules()}
    assert {one.output_of for one in spec(fused).points()} <= modules


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_a_sequence_has_its_bits_in_a_pack_and_in_pages(fused: bool, dtype: torch.dtype) -> None:
    """Also at any split into steps, and beside padding."""
    mixer, lengths = drawn(spec(fused).module(0)).to(dtype), [13, 1, 22]
    x = rows(sum(lengths) + 12, dtype)
    whole = packed(mixer, x, lengths)
    parts = [one.clone() for one in whole[:36].split(lengths)]
    assert not whole[36:].any()
    for number, one in enumerate(x[:36].split(lengths)):
        padded = torch.cat([one, one.new_ones(48 - len(one), HIDDEN)])
        assert torch.equal(packed(mixer, padded, [len(one)])[: len(one)], parts[number])
    for steps in ([22], [1] * 22, [5, 1, 9, 4, 3]):
        assert torch.equal(in_pages(mixer, fused, x[14:36], steps), parts[2])


def in_pages(mixer: nn.Module, fused: bool, x: Tensor, steps: list[int]) -> Tensor:
    """Feed one sequence to a cache, so many tokens at a time, each padded to the row tile."""
    cache = KvCache(
        [spec(fused).cache()], num_pages=8, page_size=4, dtype=x.dtype, device=CPU, num_states=3
    )
    for states in cache.states[0]:
        states.fill_(torch.nan)  # as another sequence may have left them
    table, done, out = np.array([[5, 2, 7, 0, 3, 1]]), 0, []
    for length in steps:
        places = np.arange(done, done + length)
        attend = PagedAttention.chunks(
            cache,
            page_table=table,
            starts=np.array([done]),
            lengths=np.array([length]),
            slots=table[0, places // 4] * 4 + places % 4,
            states=np.array([2]),
        )
        new = torch.cat([x[done : done + length], x.new_ones(48 - length, HIDDEN)])
        out.append(mixer(new, NO_ROTARY, attend)[:length])
        done += length
    return torch.cat(out)


def test_a_continued_sequence_reads_its_prefix() -> None:
    mixer, x = drawn(spec(False).module(0)), rows(30)
    attend = PackedAttention(
        np.array([9, 12, 9]), device=CPU, prefixes=np.array([-1, 0, 0], np.int32)
    )
    out = mixer(x, NO_ROTARY, attend)
    alone = packed(mixer, torch.cat([x[:9], x[21:]]), [18])
    assert torch.equal(out[21:], alone[9:])


def test_ranks_that_would_share_it_are_refused() -> None:
    assert spec(False).part(1) == spec(False)
    whole = dense_spec(
        "qwen3", vocab=64, hidden=HIDDEN, inner=64, layers=1, heads=(4, 2, 8), positions=64
    )
    blocks = tuple(replace(block, mixer=spec(False)) for block in whole.blocks)
    with pytest.raises(ConfigError, match="2 ranks cannot share a gated delta layer: set split"):
        check_parts(replace(whole, blocks=blocks), 2, "split.train.tp = 2")

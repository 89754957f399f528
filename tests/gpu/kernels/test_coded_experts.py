"""Experts in few bits on a GPU: the bits of what their codes stand for, among any rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from spmd_rl.kernels import linear_fp32
from spmd_rl.kernels.low_precision.block_codes import BlockCodes
from spmd_rl.kernels.runtime.cuda_graph import capture
from spmd_rl.model.formats import FORMATS, WeightFormat
from spmd_rl.model.layers.moe_module import MoeMlp
from spmd_rl.model.linear import Linear
from tests.gpu.kernels.mixtures import SIZES, mixture, one_by_one
from tests.gpu.kernels.test_coded_weights import weight_of

pytest.importorskip("triton")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="the kernel needs wgmma of Hopper")
ROWS = (1, 2, 8, 33, 64, 256, 512, 3000)


def coded_mixture(name: str, of_codes: WeightFormat) -> tuple[MoeMlp, MoeMlp]:
    """Return a layer whose experts hold codes of all kinds, and one with what these stand for."""
    coded, plain = mixture(name), mixture(name)
    for number, (expert, other) in enumerate(zip(coded.experts, plain.experts, strict=True)):
        for layer, twin in zip(expert.children(), other.children(), strict=True):
            assert isinstance(layer, Linear) and isinstance(twin, Linear)
            rows, columns = layer.weight.shape
            weight = weight_of(rows, columns, number, of_codes)
            layer.hold_codes(weight.format)
            layer.codes.codes.copy_(weight.codes)
            layer.codes.scales.copy_(weight.scales)
            twin.weight = nn.Parameter(weight.decoded(torch.bfloat16))
    return coded, plain


def codes_of(module: MoeMlp, name: str) -> list[BlockCodes]:
    """Return the codes of all experts' projection `name`."""
    return [getattr(expert, name).codes for expert in module.experts]


@pytest.mark.parametrize("name", ["uneven", "30B-A3B", "GLM-4.5-Air"])
@pytest.mark.parametrize("of_codes", FORMATS)
@torch.no_grad()
def test_codes_have_the_bits_of_what_they_stand_for(
    of_codes: WeightFormat, name: str, rows, unequal
) -> None:
    coded, plain = coded_mixture(name, of_codes)
    for count in ROWS:
        x = rows("normal", count, SIZES[name].hidden)
        found, expected = coded(x), plain(x)
        assert found.isfinite().all()
        assert unequal(found, expected) == 0, count
    assert unequal(one_by_one(coded, x), expected) == 0


@pytest.mark.parametrize("of_codes", FORMATS)
@torch.no_grad()
def test_rows_in_a_decoding_step_have_the_bits_of_a_prompts(
    of_codes: WeightFormat, rows, unequal
) -> None:
    coded, _ = coded_mixture("30B-A3B", of_codes)
    x = rows("normal", 4096, SIZES["30B-A3B"].hidden)
    whole = coded(x)
    for size in (1, 8, 64, 256):
        parts = [coded(part) for part in x[: 2 * size].split(size)]
        assert unequal(torch.cat(parts), whole[: 2 * size]) == 0, size


@pytest.mark.parametrize("of_codes", FORMATS)
@torch.no_grad()
def test_a_graph_reads_the_codes_of_a_later_push(of_codes: WeightFormat, rows, unequal) -> None:
    coded, plain = coded_mixture("30B-A3B", of_codes)
    x = rows("normal", 8, SIZES["30B-A3B"].hidden)
    coded(x)  # makes the tables
    graph, out = capture(lambda: coded(x), torch.cuda.graph_pool_handle())
    for own, other in pairwise(codes_of(coded, "gate_proj")):
        own.codes.copy_(other.codes)
    graph.replay()
    assert unequal(out, coded(x)) == 0
    assert unequal(out, plain(x)) > 0


@pytest.mark.parametrize("of_codes", FORMATS)
@torch.no_grad()
def test_control_one_code_of_one_expert_changes_the_output(
    of_codes: WeightFormat, rows, unequal
) -> None:
    coded, plain = coded_mixture("tiny", of_codes)
    x = rows("normal", 64, SIZES["tiny"].hidden)
    assert unequal(coded(x), plain(x)) == 0
    chosen = int(linear_fp32(x, coded.gate.weight)[0].argmax())
    codes_of(coded, "down_proj")[chosen].codes.view(torch.uint8)[3, 5] ^= 0x44
    assert unequal(coded(x), plain(x)) > 0

"""Weights in 8 bits on a GPU: rounding as on the CPU, and products with the bits of bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import linear
from spmd_rl.kernels.low_precision.block_codes import BlockCodes, num_blocks
from spmd_rl.kernels.low_precision.e4m3_blocks import (
    LEAST_EXPONENT,
    MOST_EXPONENT,
    block_maxima,
    block_scales,
    decode,
    encode,
    quantised,
    rounded,
)
from spmd_rl.kernels.low_precision.products import coded_linear

if torch.cuda.is_available():
    from spmd_rl.kernels.low_precision.coded_dispatch import TILES
    from spmd_rl.kernels.low_precision.coded_gemm_triton import CodedTile, coded_matmul_into
    from spmd_rl.kernels.low_precision.rounding_triton import decode_on_gpu

    X_FIRST = {
        CodedTile(m, n, k, 4, 4, True) for m in (64, 128) for n in (16, 32, 64) for k in (64, 128)
    }

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="the kernel needs wgmma of Hopper")
NUM_ROWS = (1, 2, 7, 8, 15, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256, 257, 1000)
# of 0.6B, 4B and 8B, and ragged ones
SHAPES = (
    (1024, 1024),
    (3072, 1024),
    (2560, 4096),
    (6144, 4096),
    (4096, 12288),
    (24576, 4096),
    (576, 1536),
    (200, 144),
    (1000, 336),
)


def weight_of(n: int, k: int, seed: int = 0) -> BlockCodes:
    """Return codes of all kinds, denormal ones too, with scales far apart."""
    generator = torch.Generator("cuda").manual_seed(seed)
    codes = torch.randint(0, 256, (n, k), generator=generator, device="cuda", dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    exponents = torch.randint(-14, -6, num_blocks((n, k)), generator=generator, device="cuda")
    return BlockCodes(codes.view(torch.float8_e4m3fn), exponents.float().exp2())


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)


@pytest.mark.parametrize("exponent", [LEAST_EXPONENT, -9, 0, MOST_EXPONENT])
def test_every_code_is_decoded_to_its_number(exponent: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    scales = torch.full((1, 2), 2.0**exponent)
    host = BlockCodes(codes.view(torch.float8_e4m3fn), scales)
    expected = decode(host.codes, host.scales, torch.bfloat16)
    found = decode_on_gpu(BlockCodes(host.codes.cuda(), scales.cuda())).cpu()
    finite = ~expected.isnan()
    assert torch.equal(bits(found)[finite], bits(expected)[finite])
    assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("exponent", [LEAST_EXPONENT, -9, 0, MOST_EXPONENT])
def test_the_product_decodes_every_code(exponent: int) -> None:
    """A product with one column of x that is 1, and 0 elsewhere, is a column of the weight."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    codes = codes.repeat(128, 1).t().contiguous().cuda()  # [256, 128]
    weight = BlockCodes(codes.view(torch.float8_e4m3fn), torch.full((2, 1), 2.0**exponent).cuda())
    x = torch.eye(128, device="cuda", dtype=torch.bfloat16)[:16]
    expected = decode_on_gpu(weight)[:, :16].t()
    assert torch.equal(coded_linear(x, weight), expected)


@pytest.mark.parametrize("first_row", [0, 37])
@pytest.mark.parametrize("shape", [(300, 256), (129, 200), (5, 16)])
def test_rounding_is_that_of_the_cpu(shape: tuple[int, int], first_row: int) -> None:
    values = torch.randn(shape) * torch.randn(shape).mul(3).exp2()
    values[0, :9] = torch.tensor([0, -0.0, 1, 17 / 16, 19 / 16, 2**-9, 3 * 2**-10, 448, 2**-10])
    whole = first_row + shape[0]
    maxima = block_maxima(values, whole, first_row)
    assert torch.equal(block_maxima(values.cuda(), whole, first_row).cpu(), maxima)
    scales = block_scales(maxima)
    assert torch.equal(block_scales(maxima.cuda()).cpu(), scales)
    codes = encode(values, scales, first_row)
    assert torch.equal(bits(encode(values.cuda(), scales.cuda(), first_row)).cpu(), bits(codes))
    for dtype in (torch.bfloat16, torch.float32):
        found = rounded(values.cuda(), scales.cuda(), dtype, first_row).cpu()
        assert torch.equal(found, decode(codes, scales, dtype, first_row))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_has_the_bits_of_the_decoded_weight(
    shape: tuple[int, int], has_bias: bool, rows, unequal
) -> None:
    n, k = shape
    weight = weight_of(n, k)
    decoded = decode_on_gpu(weight)
    assert torch.equal(decoded, decode(weight.codes, weight.scales, torch.bfloat16))
    bias = rows("normal", 1, n)[0] if has_bias else None
    x = rows("normal", max(NUM_ROWS), k)
    for m in NUM_ROWS:
        expected = linear(x[:m], decoded, bias)
        assert unequal(coded_linear(x[:m], weight, bias), expected) == 0, m


@pytest.mark.parametrize("kind", ["wide", "cancelling"])
def test_hard_numbers_have_the_same_chain(kind: str, unequal) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    n, k = 512, 4096
    x = torch.randn(64, k, generator=generator, device="cuda")
    if kind == "wide":
        x *= (torch.randn(64, k, generator=generator, device="cuda") * 12).exp2()
    else:  # large numbers that cancel, and a small one between them: it shows the order of sums
        x[:, ::2] = 1024.0
        x[:, 1::2] = -1024.0
        x[:, 5::97] = 2.0**-15
    weight, x = weight_of(n, k, 2), x.bfloat16()
    expected = linear(x, decode_on_gpu(weight))
    assert unequal(coded_linear(x, weight), expected) == 0


def test_every_tile_has_the_same_bits(rows, unequal) -> None:
    n, k = 1024, 2048
    weight = weight_of(n, k)
    x = rows("normal", 100, k)
    expected = linear(x, decode_on_gpu(weight))
    for tile in {tile for pair in TILES.values() for tile in pair} | X_FIRST:
        out = x.new_empty(100, n)
        coded_matmul_into(out, x, weight, None, tile)
        assert unequal(out, expected) == 0, tile


def test_graphs_replay_the_same_bits(rows, unequal) -> None:
    weight, x = weight_of(1024, 2048), rows("normal", 16, 2048)
    expected = coded_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = coded_linear(x, weight)
    for _ in range(2):
        graph.replay()
        assert unequal(found, expected) == 0


def test_control_a_scale_that_is_no_power_of_two_is_found() -> None:
    weight = weight_of(256, 256)
    odd = BlockCodes(weight.codes, weight.scales * 1.2)
    exact = odd.codes.double() * odd.scales.double().repeat_interleave(128, 0).repeat_interleave(
        128, 1
    )
    assert not torch.equal(decode_on_gpu(odd).double(), exact)
    even = weight.codes.double() * weight.scales.double().repeat_interleave(
        128, 0
    ).repeat_interleave(128, 1)
    assert torch.equal(decode_on_gpu(weight).double(), even)


def test_control_one_code_changes_the_product(rows, unequal) -> None:
    weight, x = weight_of(1024, 2048), rows("normal", 16, 2048)
    before = coded_linear(x, weight)
    column = int(weight.codes[3].float().abs().argmax())
    weight.codes.view(torch.uint8)[3, column] ^= 0x80  # its sign
    assert unequal(coded_linear(x, weight), before) > 0


def test_control_mma_sync_in_another_order_is_not_taken() -> None:
    """Tiles of fewer than 64 rows of the weight would take steps of K in another order."""
    assert all(tile.n >= 64 for pair in TILES.values() for tile in pair)
    assert issubclass(CodedTile, tuple)


def test_quantised_weights_are_those_of_the_cpu() -> None:
    weight = torch.randn(300, 272)
    host, device = quantised(weight), quantised(weight.cuda())
    assert torch.equal(host.scales, device.scales.cpu())
    assert torch.equal(bits(host.codes), bits(device.codes).cpu())

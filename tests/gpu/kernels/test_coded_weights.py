"""Weights in few bits on a GPU: rounding as on the CPU, and products with the bits of bfloat16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import linear, rms_norm, silu_mul
from spmd_rl.kernels.low_precision import block_codes
from spmd_rl.kernels.low_precision.block_codes import BlockCodes
from spmd_rl.kernels.low_precision.products import coded_linear
from spmd_rl.model.formats import FORMATS, WeightFormat

if torch.cuda.is_available():
    from spmd_rl.kernels.low_precision import coded_dispatch
    from spmd_rl.kernels.low_precision.coded_dispatch import TILES, decode_on_gpu
    from spmd_rl.kernels.low_precision.coded_gemm import WARP_TILES, WarpTile, warp_matmul_into
    from spmd_rl.kernels.low_precision.coded_gemm_triton import coded_matmul_into

    OTHER_TILES = {  # that no table uses
        WarpTile(96, 8, 4, 256, 2),
        WarpTile(192, 16, 8, 128),
        WarpTile(64, 256, 4, 128, grouped=True),
        WarpTile(128, 32, 8, 256, grouped=True),
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


def weight_of(n: int, k: int, seed: int = 0, name: WeightFormat = "e4m3") -> BlockCodes:
    """Return codes of all kinds, denormal ones too, with scales far apart."""
    generator, found = torch.Generator("cuda").manual_seed(seed), FORMATS[name]

    def drawn(first: int, last: int, shape: tuple[int, int]) -> Tensor:
        return torch.randint(first, last, shape, generator=generator, device="cuda")

    codes = drawn(0, 256, found.code_shape((n, k))).to(torch.uint8)
    if name == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    shape = found.scale_shape((n, k))
    scales = drawn(-14, -6, shape).float().exp2()
    if name != "e4m3":  # five bits
        scales *= drawn(16, 32, shape) / 16
    dtypes = [block_codes.torch_dtype(one) for one in (found.code_dtype, found.scale_dtype)]
    return BlockCodes(codes.view(dtypes[0]), scales.to(dtypes[1]), k, found)


def with_scales(weight: BlockCodes, scale: float) -> BlockCodes:
    return replace(weight, scales=torch.full_like(weight.scales, scale))


def exact(weight: BlockCodes) -> Tensor:
    """Return what codes stand for, in float64."""
    scales = weight.scales.double()
    wide = scales.repeat_interleave(weight.format.block_rows, 0)[: weight.shape[0]]
    numbers = weight.format.numbers(weight.codes, weight.num_columns).double()
    return numbers * wide.repeat_interleave(weight.format.block_columns, 1)[:, : weight.num_columns]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)


@pytest.mark.parametrize("exponent", [-117, -9, 0, 7])
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_is_decoded_to_its_number(name: WeightFormat, exponent: int) -> None:
    """Bytes of all kinds, in each place of a block."""
    weight = with_scales(weight_of(256, 512, 0, name), 2.0**exponent)
    weight.codes.view(torch.uint8)[:] = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    found, expected = decode_on_gpu(weight), exact(weight)
    finite = ~expected.isnan()
    assert torch.equal(found.double()[finite], expected[finite])
    assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("exponent", [-117, -9, 0, 7])
@pytest.mark.parametrize("name", FORMATS)
def test_the_product_decodes_every_code(name: WeightFormat, exponent: int) -> None:
    """A product with one column of x that is 1, and 0 elsewhere, is a column of the weight."""
    weight = with_scales(weight_of(256, 128, 0, name), 2.0**exponent)
    codes = torch.arange(256, dtype=torch.uint8)
    if name == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0
    weight.codes.view(torch.uint8)[:] = codes.unsqueeze(1)
    expected = decode_on_gpu(weight).t()
    x = torch.eye(128, device="cuda", dtype=torch.bfloat16)
    for first in range(0, 128, 16):
        found = coded_linear(x[first : first + 16], weight)
        assert torch.equal(found, expected[first : first + 16])


@pytest.mark.parametrize("first_row", [0, 37])
@pytest.mark.parametrize("shape", [(300, 256), (129, 200), (5, 16)])
@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_that_of_the_cpu(
    name: WeightFormat, shape: tuple[int, int], first_row: int
) -> None:
    own = FORMATS[name]
    values = torch.randn(shape) * torch.randn(shape).mul(3).exp2()
    values[0, :9] = torch.tensor([0, -0.0, 1, 17 / 16, 19 / 16, 2**-9, 3 * 2**-10, 448, 2**-10])
    whole = first_row + shape[0]
    maxima = block_codes.maxima(own, values, whole, first_row)
    assert torch.equal(block_codes.maxima(own, values.cuda(), whole, first_row).cpu(), maxima)
    scales = own.scales_of(maxima)
    assert torch.equal(own.scales_of(maxima.cuda()).cpu(), scales)
    codes = block_codes.encode(own, values, scales, first_row)
    found = block_codes.encode(own, values.cuda(), scales.cuda(), first_row)
    assert torch.equal(bits(found).cpu(), bits(codes))
    for dtype in (torch.bfloat16, torch.float32):
        rounded = block_codes.rounded(own, values.cuda(), scales.cuda(), dtype, first_row).cpu()
        assert torch.equal(
            rounded, block_codes.decode(own, codes, scales, shape[1], dtype, first_row)
        )


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_has_the_bits_of_the_decoded_weight(
    name: WeightFormat, shape: tuple[int, int], has_bias: bool, rows, unequal
) -> None:
    n, k = shape
    weight = weight_of(n, k, 0, name)
    decoded = decode_on_gpu(weight)
    assert torch.equal(decoded, weight.decoded(torch.bfloat16))
    bias = rows("normal", 1, n)[0] if has_bias else None
    x = rows("normal", max(NUM_ROWS), k)
    for m in NUM_ROWS:
        expected = linear(x[:m], decoded, bias)
        assert unequal(coded_linear(x[:m], weight, bias), expected) == 0, m


@pytest.mark.parametrize("kind", ["wide", "cancelling"])
@pytest.mark.parametrize("name", FORMATS)
def test_hard_numbers_have_the_same_chain(name: WeightFormat, kind: str, unequal) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    n, k = 512, 4096
    x = torch.randn(64, k, generator=generator, device="cuda")
    if kind == "wide":
        x *= (torch.randn(64, k, generator=generator, device="cuda") * 12).exp2()
    else:  # large numbers that cancel, and a small one between them: it shows the order of sums
        x[:, ::2] = 1024.0
        x[:, 1::2] = -1024.0
        x[:, 5::97] = 2.0**-15
    weight, x = weight_of(n, k, 2, name), x.bfloat16()
    expected = linear(x, decode_on_gpu(weight))
    assert unequal(coded_linear(x, weight), expected) == 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 100])
def test_every_tile_has_the_same_bits(name: WeightFormat, num_rows: int, rows, unequal) -> None:
    """Of weights whose rows and columns no tile divides."""
    n, k = 1000, 2032
    weight = weight_of(n, k, 0, name)
    x, bias = rows("normal", num_rows, k), rows("normal", 1, n)[0]
    expected = linear(x, decode_on_gpu(weight), bias)
    out = x.new_empty(num_rows, n)
    for tile in {tile for row in WARP_TILES.values() for _, tile in row} | OTHER_TILES:
        warp_matmul_into(out.fill_(7), x, weight, bias, tile)
        assert unequal(out, expected) == 0, tile
    for triton_tile in {tile for pair in TILES.values() for tile in pair}:
        coded_matmul_into(out.fill_(7), x, weight, bias, triton_tile)
        assert unequal(out, expected) == 0, triton_tile


@pytest.mark.parametrize("name", FORMATS)
def test_without_bindings_triton_has_the_same_bits(
    name: WeightFormat, rows, unequal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded_dispatch, "has_bindings", lambda: False)
    weight, x = weight_of(1024, 2048, 0, name), rows("normal", 200, 2048)
    for m in (1, 40, 200):
        expected = linear(x[:m], decode_on_gpu(weight))
        assert unequal(coded_linear(x[:m], weight), expected) == 0


@pytest.mark.parametrize("num_rows", [1, 16, 24, 100, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_graphs_replay_the_same_bits(name: WeightFormat, num_rows: int, rows, unequal) -> None:
    """Products begin early, behind kernels that write what they read."""
    up, down = weight_of(4096, 1024, 0, name), weight_of(1024, 2048, 1, name)
    scale = 1 + rows("normal", 1, 1024)[0] / 8

    def layer(x: Tensor) -> Tensor:
        for _ in range(3):
            hidden = coded_linear(rms_norm(x, scale, 1e-6), up)
            x = coded_linear(silu_mul(*hidden.chunk(2, dim=-1)), down)
        return x

    x = rows("normal", num_rows, 1024)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer(x)
    for seed in range(5):
        generator = torch.Generator("cuda").manual_seed(seed)
        x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))
        graph.replay()
        assert unequal(found, layer(x)) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_control_a_scale_of_more_bits_is_found(name: WeightFormat) -> None:
    weight = weight_of(256, 256, 0, name)
    odd = replace(weight, scales=weight.scales.float() * 1.23)
    assert not torch.equal(decode_on_gpu(odd).double(), exact(odd))
    assert torch.equal(decode_on_gpu(weight).double(), exact(weight))


@pytest.mark.parametrize("name", FORMATS)
def test_control_one_code_changes_the_product(name: WeightFormat, rows, unequal) -> None:
    weight, x = weight_of(1024, 2048, 0, name), rows("normal", 16, 2048)
    before = coded_linear(x, weight)
    column = int(weight.decoded(torch.float32)[3, :64].abs().argmax())
    weight.codes.view(torch.uint8)[3, column] ^= 0x88  # signs
    assert unequal(coded_linear(x, weight), before) > 0


def test_control_mma_sync_in_another_order_is_not_taken() -> None:
    """Triton's tiles of fewer than 64 rows of the weight would take K in another order."""
    assert all(tile.n >= 64 for pair in TILES.values() for tile in pair)


@pytest.mark.parametrize("first_row", [0, 37])
@pytest.mark.parametrize("name", FORMATS)
def test_several_weights_are_rounded_as_each_alone(name: WeightFormat, first_row: int) -> None:
    own, values = FORMATS[name], torch.randn(5, 129, 200, device="cuda")
    scales = own.scales_of(block_codes.maxima(own, values, first_row + 129, first_row))
    for dtype in (torch.bfloat16, torch.float32):
        found = block_codes.rounded_each(own, list(values), list(scales), dtype, first_row, 130)
        each = [
            block_codes.rounded(own, *one, dtype, first_row)
            for one in zip(values, scales, strict=True)
        ]
        assert torch.equal(found[:, :129], torch.stack(each)) and not found[:, 129:].any()


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_weights_are_those_of_the_cpu(name: WeightFormat) -> None:
    weight = torch.randn(300, 272)
    host, device = (
        block_codes.quantised(FORMATS[name], weight),
        block_codes.quantised(FORMATS[name], weight.cuda()),
    )
    assert torch.equal(host.scales, device.scales.cpu())
    assert torch.equal(bits(host.codes), bits(device.codes).cpu())

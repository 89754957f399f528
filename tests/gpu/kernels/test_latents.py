"""Attention to latents: float64's numbers, and equal bits however sequences are cut and batched."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import KvCache, PackedAttention, PagedAttention
from spmd_rl.kernels.latents.of_heads import linear_of_heads
from spmd_rl.kernels.latents.sizes import LatentSizes
from spmd_rl.kernels.row_tiles.tiles import PAGE
from spmd_rl.kernels.runtime.padding import pad_rows
from spmd_rl.model.layers.layer import CacheSpec
from tests.unit.kernels.latents.latent_case import (
    Chunks,
    LatentRows,
    chunks_of,
    oracle,
    pages_of,
    rows_of,
    slots_of,
    tokens_of,
)

DEVICE = torch.device("cuda")
PUBLISHED = LatentSizes(512, 64)
# of Moonlight, GLM-4.7-Flash, Kimi-K2 and DeepSeek-V3, then of no family
CASES = [
    *((heads, PUBLISHED, torch.bfloat16) for heads in (16, 20, 64, 128)),
    (5, LatentSizes(48, 24), torch.bfloat16),
    (6, LatentSizes(20, 8), torch.float32),
]
LENGTHS = [1, 2, 63, 64, 65, 200, 330]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}x{sum(case[1])}")
def case(request: pytest.FixtureRequest) -> tuple[int, LatentSizes, torch.dtype]:
    return request.param


@pytest.fixture
def sizes(case: tuple[int, LatentSizes, torch.dtype]) -> LatentSizes:
    return case[1]


@pytest.fixture
def rows(case: tuple[int, LatentSizes, torch.dtype]) -> LatentRows:
    return LatentRows(*(one.to(DEVICE) for one in rows_of(sum(LENGTHS), *case)))


def attend(call: Callable[..., Tensor], q: Tensor, keys: Tensor, sizes: LatentSizes) -> Tensor:
    """Attend with rows padded to the row tile, as the network calls it."""
    k = pad_rows(keys[:, None])
    return call(0, pad_rows(q), k, k[..., sizes.rotary :])[: len(q)]


def packed(q: Tensor, keys: Tensor, lengths: list[int], sizes: LatentSizes) -> Tensor:
    call = PackedAttention(np.array(lengths, np.int32), device=DEVICE)
    return attend(call, q, keys, sizes)


def new_cache(rows: LatentRows, sizes: LatentSizes, pages: Tensor) -> KvCache:
    """Slots that nothing is written to hold NaN."""
    layer = CacheSpec(((1, sum(sizes)),), rows.q.shape[1], latent_dim=sizes.latent)
    cache = KvCache(
        [layer],
        num_pages=int(pages.max()) + 4,
        page_size=PAGE,
        dtype=rows.q.dtype,
        device=DEVICE,
    )
    cache.data.fill_(torch.nan)
    return cache


def in_chunks(cache: KvCache, pages: Tensor, step: Chunks) -> PagedAttention:
    return PagedAttention.chunks(
        cache,
        page_table=pages[step.chosen].numpy(),
        starts=np.array(step.starts),
        lengths=np.array(step.lengths),
        slots=slots_of(pages, step).numpy(),
    )


def on_device(cache: KvCache, pages: Tensor, step: Chunks) -> PagedAttention:
    """Take the path of recorded steps: that of decoding where all have one token.

    There is room for sequences and tokens that are not there.
    """
    room = 3
    table = torch.zeros(len(step.chosen) + room, pages.shape[1], dtype=torch.int32)
    table[: len(step.chosen)] = pages[step.chosen].clamp(min=0)
    ends = torch.tensor(step.starts) + torch.tensor(step.lengths)
    slots = torch.cat([slots_of(pages, step), torch.full((room,), -1)]).to(DEVICE)
    if set(step.lengths) == {1}:
        num_keys = torch.cat([ends, torch.ones(room, dtype=torch.long)]).int().to(DEVICE)
        return PagedAttention.decode(cache, pages=table.to(DEVICE), num_keys=num_keys, slots=slots)
    num_keys = torch.cat([ends, torch.zeros(room, dtype=torch.long)]).int().to(DEVICE)
    ends_of_rows = [0, *np.cumsum(step.lengths), *[sum(step.lengths)] * room]
    bounds = torch.tensor(ends_of_rows).int().to(DEVICE)
    given = {"pages": table.to(DEVICE), "num_keys": num_keys, "bounds": bounds, "slots": slots}
    return PagedAttention.prefill(cache, **given)


def test_the_output_is_that_of_float64(rows: LatentRows, sizes: LatentSizes) -> None:
    out = packed(rows.q, rows.keys, LENGTHS, sizes)
    expected = oracle(rows.q.double(), rows.keys.double(), LENGTHS, sizes)
    most = 2e-6 if out.dtype == torch.float32 else 6e-3
    assert (out - expected).norm() <= most * expected.norm()


def test_gradients_are_those_of_float64(rows: LatentRows, sizes: LatentSizes) -> None:
    given = [one.clone().requires_grad_() for one in rows[:2]]
    packed(given[0], given[1], LENGTHS, sizes).backward(rows.grad)
    leaves = [one.double().requires_grad_() for one in rows[:2]]
    oracle(leaves[0], leaves[1], LENGTHS, sizes).backward(rows.grad.double())
    for one, expected in zip(given, leaves, strict=True):
        assert one.grad is not None and expected.grad is not None
        most = 5e-6 if one.dtype == torch.float32 else 1e-2
        assert (one.grad - expected.grad).norm() <= most * expected.grad.norm()


def test_gradients_have_the_same_bits_again(rows: LatentRows, sizes: LatentSizes) -> None:
    found = []
    for _ in range(2):
        given = [one.clone().requires_grad_() for one in rows[:2]]
        packed(given[0], given[1], LENGTHS, sizes).backward(rows.grad)
        found.append([one.grad for one in given])
    for one, again in zip(*found, strict=True):
        assert one is not None and again is not None
        assert torch.equal(one, again)


def test_a_sequence_has_its_bits_alone_and_in_packs(rows: LatentRows, sizes: LatentSizes) -> None:
    together = packed(rows.q, rows.keys, LENGTHS, sizes).split(LENGTHS)
    parts = (one.split(LENGTHS) for one in rows[:2])
    for q, keys, length, expected in zip(*parts, LENGTHS, together, strict=True):
        assert torch.equal(packed(q, keys, [length], sizes), expected)


@pytest.mark.parametrize("path", [in_chunks, on_device])
@pytest.mark.parametrize("seed", [0, 1])
def test_pages_give_the_bits_of_packs(
    path: Callable[..., PagedAttention], seed: int, rows: LatentRows, sizes: LatentSizes
) -> None:
    """Cut at any place, decoded or not, beside any others, in pages anywhere."""
    pages = pages_of(LENGTHS, seed)
    cache, kinds = new_cache(rows, sizes, pages), set()
    expected = packed(rows.q, rows.keys, LENGTHS, sizes)
    for step in chunks_of(LENGTHS, seed):
        tokens = tokens_of(LENGTHS, step).to(DEVICE)
        call = path(cache, pages, step)
        padded = torch.cat([tokens, tokens.new_zeros(len(call.slots) - len(tokens))])
        out = attend(call, rows.q[padded], rows.keys[padded], sizes)
        assert torch.equal(out[: len(tokens)], expected[tokens])
        kinds.add(set(step.lengths) == {1})
    assert kinds == {True, False}, "steps of decoding, and others"


def test_a_whole_prompt_has_the_bits_of_single_tokens(rows: LatentRows, sizes: LatentSizes) -> None:
    pages = pages_of(LENGTHS, 5)
    whole, single = (new_cache(rows, sizes, pages) for _ in range(2))
    one, begin = len(LENGTHS) - 1, sum(LENGTHS[:-1])
    own = slice(begin, begin + LENGTHS[one])
    step = Chunks([one], [0], [LENGTHS[one]])
    expected = attend(in_chunks(whole, pages, step), rows.q[own], rows.keys[own], sizes)
    for place in range(LENGTHS[one]):
        call = on_device(single, pages, Chunks([one], [place], [1]))
        at = torch.tensor([begin + place, 0, 0, 0], device=DEVICE)
        out = attend(call, rows.q[at], rows.keys[at], sizes)
        assert torch.equal(out[0], expected[place])


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 512), (512, 128), (192, 512)])
def test_products_of_heads(inputs: int, outputs: int) -> None:
    """Float64's numbers, gradients too, and a token's bits alone and beside others."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = (300, 20, inputs), (20, outputs, inputs), (300, 20, outputs)
    x, weights, grad = (
        torch.randn(one, device=DEVICE, generator=generator).bfloat16() for one in shapes
    )
    ours = [one.clone().requires_grad_() for one in (x, weights)]
    theirs = [one.double().requires_grad_() for one in (x, weights)]
    out = linear_of_heads(ours[0], ours[1])
    expected = torch.einsum("thi,hoi->tho", theirs[0], theirs[1])
    out.backward(grad)
    expected.backward(grad.double())
    assert (out - expected).norm() <= 4e-3 * expected.norm()
    for one, two in zip(ours, theirs, strict=True):
        assert one.grad is not None and two.grad is not None
        assert (one.grad - two.grad).norm() <= 4e-3 * two.grad.norm()
    for start, stop in [(0, 1), (7, 8), (63, 65), (100, 300)]:
        assert torch.equal(linear_of_heads(x[start:stop], weights), out[start:stop])


def test_control_other_blocks_of_keys_have_other_bits(
    rows: LatentRows, sizes: LatentSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spmd_rl.kernels.latents import attend_triton

    expected = packed(rows.q, rows.keys, LENGTHS, sizes)
    tile = attend_triton.latent_tile(rows.q.dtype)
    smaller = tile._replace(keys=tile.keys // 2)
    monkeypatch.setattr(attend_triton, "latent_tile", lambda dtype: smaller)
    out = packed(rows.q, rows.keys, LENGTHS, sizes)
    assert not torch.equal(out, expected)
    assert (out - expected).norm() <= 1e-2 * expected.norm()

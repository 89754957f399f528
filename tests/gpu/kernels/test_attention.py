"""Packed training, paged decoding and chunked prefill have the same bits on a GPU.

All agree with float64. Keys are seen all at once, and in splits of a fixed size.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import PagedAttention, contract
from spmd_rl.kernels.attention.flash import flash_supports
from spmd_rl.kernels.attention.flash_decode import decode_attention
from spmd_rl.kernels.attention.flash_tile import BOX_ROWS, LARGE_HEAD, key_block
from tests.gpu.kernels.gradients import gradient
from tests.gpu.kernels.paged_case import Paged, each, padded, qkv, sequences
from tests.unit.kernels.paged_case import Heads, oracle, packed

DEVICE = torch.device("cuda")
LENGTHS = [1, 16, 127, 128, 129, 700, 255, 256, 257, 1, 383, 1500]
SPLIT, SPLIT_LENGTHS = 256, [1, 255, 256, 257, 300, 511, 512, 513, 700, 1500, 64]


@pytest.fixture(autouse=True)
def _needs_flash() -> None:
    if not flash_supports(128, torch.bfloat16, DEVICE):
        pytest.skip("needs FlashAttention-4 on a Hopper GPU")


def page_sizes(heads: Heads) -> list[int]:
    return [key_block(heads.dim)] if heads.dim > LARGE_HEAD else [1, 16, 64, 128]


HEADS = [
    *(Heads(16, 8, 128), Heads(32, 8, 128), Heads(14, 2, 64), Heads(4, 4, 64)),
    *(Heads(8, 2, 32), Heads(4, 2, 96), Heads(16, 4, 256), Heads(6, 1, 256)),
]
SPLIT_HEADS = [HEADS[0], HEADS[2], HEADS[5], HEADS[6]]


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize(
    ("heads", "page_size"), [(heads, size) for heads in HEADS for size in page_sizes(heads)]
)
def test_chunks_equal_packed(heads: Heads, page_size: int, poison: bool, unequal) -> None:
    data = qkv(sum(LENGTHS), heads)
    chunks = Paged(LENGTHS, heads, page_size, poison).chunks(data, [1, 2, 17, 64, 100, 128, 512])
    assert unequal(chunks, packed(*data, LENGTHS, heads)) == 0


@pytest.mark.parametrize(
    ("heads", "page_size"), [(heads, size) for heads in HEADS for size in page_sizes(heads)]
)
def test_decode_equals_packed(heads: Heads, page_size: int, unequal) -> None:
    """Decode one token at a time after a prefix of any length, all sequences together."""
    lengths = [130, 3, 257, 128, 64, 40]
    data = qkv(sum(lengths), heads)
    decoded = Paged(lengths, heads, page_size).decoding(data, 20)
    assert unequal(decoded, packed(*data, lengths, heads)) == 0


@pytest.mark.parametrize(
    ("batch", "longest"), [(12, 900), (140, 900), (300, 900), (6, 6000), (40, 6000)]
)
@pytest.mark.parametrize("heads", HEADS)
def test_recorded_decode_equals_packed(heads: Heads, batch: int, longest: int, unequal) -> None:
    """Replay a graph with fewer tiles than SMs and with many more, beside poison.

    A changed key is seen, and no unused row is read.
    """
    lengths = np.random.default_rng(2).integers(1, longest, batch).tolist()
    data, last = qkv(sum(lengths), heads), torch.from_numpy(np.cumsum(lengths) - 1).to(DEVICE)
    page_size = key_block(heads.dim)
    paged = Paged(lengths, heads, page_size, poison=True)
    paged.step(dict(enumerate(lengths)), *data)
    width = -(-longest // page_size)
    table = np.stack(
        [np.pad(pages, (0, width - len(pages)), mode="edge") for pages in paged.tables]
    )
    attend = PagedAttention.decode(
        paged.cache,
        pages=torch.from_numpy(table.astype(np.int32)).to(DEVICE),
        num_keys=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        slots=torch.full((batch,), -1, device=DEVICE),
    )
    newest = [x[last] for x in data]
    attend(0, *newest)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(0, *newest)
    expected = packed(*data, lengths, heads)[last]

    def replay() -> None:
        out.fill_(torch.nan)
        graph.replay()

    replay()
    assert unequal(out, expected) == 0
    for pages, length in zip(paged.tables, lengths, strict=True):
        newest_page, used = divmod(length - 1, page_size)
        paged.cache.data[:, :, pages[newest_page], (used // BOX_ROWS + 1) * BOX_ROWS :] = torch.nan
    replay()
    assert unequal(out, expected) == 0
    paged.cache.data[0, 0, paged.tables[3][0], 0] *= 1.05
    replay()
    assert unequal(out[:3], expected[:3]) + unequal(out[4:], expected[4:]) == 0
    assert unequal(out[3], expected[3]) > 0


@pytest.mark.parametrize(("times", "more"), [(1, 0), (1, 1), (2, 0), (2, 1), (5, 0)])
@pytest.mark.parametrize("heads", [Heads(2, 1, 64), Heads(9, 1, 64), Heads(64, 1, 128)])
def test_every_tile_is_handed_out(heads: Heads, times: int, more: int, unequal) -> None:
    """Calls in a row share a counter, with nothing between them. A wrong counter is seen."""
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    size = times * sms + more
    lengths = np.random.default_rng(3).integers(3, 700, size).tolist()
    data, ends = qkv(sum(lengths), heads), np.cumsum(lengths)
    paged = Paged(lengths, heads, 128)
    paged.step(dict(enumerate(lengths)), *data)
    table = np.stack([np.pad(pages, (0, 6 - len(pages)), mode="edge") for pages in paged.tables])
    pages, tile_counter = (
        torch.from_numpy(table.astype(np.int32)).to(DEVICE),
        paged.cache.tile_counter,
    )
    rows = [torch.from_numpy(ends - 1 - back).to(DEVICE) for back in range(3)]
    queries = [data[0][row] for row in rows]
    counts = [
        torch.from_numpy(np.array(lengths, dtype=np.int32) - back).to(DEVICE) for back in range(3)
    ]
    outs = [torch.empty_like(one) for one in queries]

    def decode() -> None:
        for q, num_keys, out in zip(queries, counts, outs, strict=True):
            decode_attention(q, *paged.cache.keys_of(0), pages, num_keys, tile_counter, out)

    decode()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    expected = packed(*data, lengths, heads)[torch.cat(rows)]

    def replay() -> int:
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        return unequal(torch.cat(outs), expected)

    for _ in range(20):
        assert replay() == 0
        assert tile_counter.item() == 0
    if size > 2 * sms:
        tile_counter.fill_(size - 2 * sms)  # as if all had been taken that no block begins with
        assert replay() > 0


def test_no_keys() -> None:
    heads = HEADS[0]
    paged = Paged([200, 200], heads, 128)
    paged.cache.data.normal_()
    q, pages = qkv(2, heads)[0], torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    num_keys, out = (
        torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        torch.full_like(q, torch.nan),
    )
    log_sum = torch.empty(2, heads.query, device=DEVICE)
    keys, values = paged.cache.layers[0]
    decode_attention(q, keys, values, pages, num_keys, paged.cache.tile_counter, out, log_sum)
    group = heads.query // heads.key
    key, value = (one[0, 0].repeat_interleave(group, dim=0) for one in (keys, values))
    assert torch.equal(out, torch.stack([torch.zeros_like(value), value]))
    assert (log_sum[0] == -torch.inf).all()
    torch.testing.assert_close(
        log_sum[1], (q[1].double() * key.double()).sum(-1).float() / heads.dim**0.5
    )


@pytest.mark.parametrize("heads", HEADS)
def test_alone_and_padded_equal_packed(heads: Heads, unequal) -> None:
    data = qkv(sum(LENGTHS), heads)
    whole = packed(*data, LENGTHS, heads).split(LENGTHS)
    for length, alone, part in zip(LENGTHS, whole, sequences(data, LENGTHS), strict=True):
        assert unequal(packed(*part, [length], heads), alone) == 0
        assert unequal(packed(*padded(part), [length], heads)[:length], alone) == 0


@pytest.mark.parametrize("heads", HEADS)
def test_against_float64(heads: Heads) -> None:
    lengths = [5, 130, 1, 64]
    leaves = each(qkv(sum(lengths) + 8, heads), Tensor.requires_grad_)
    wide = each(leaves, lambda x: x.detach().cpu().double().requires_grad_())
    out, expected = (
        packed(*leaves, lengths, heads),
        oracle(*each(wide, lambda x: x[: sum(lengths)]), lengths, heads),
    )
    push = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    out[: sum(lengths)].backward(push.to(out))
    expected.backward(push)
    pairs = [(out[: sum(lengths)], expected)] + [
        (gradient(x), gradient(y)) for x, y in zip(leaves, wide, strict=True)
    ]
    for actual, wanted in pairs:
        assert (actual.cpu().double() - wanted).norm() / wanted.norm() < 1e-2
    assert all(torch.count_nonzero(gradient(x)[sum(lengths) :]) == 0 for x in leaves)


@pytest.mark.parametrize(
    ("heads", "page_size"),
    [(SPLIT_HEADS[0], 64), *((heads, key_block(heads.dim)) for heads in SPLIT_HEADS)],
)
def test_split_chunks_equal_packed(heads: Heads, page_size: int, unequal) -> None:
    data = qkv(sum(SPLIT_LENGTHS), heads)
    chunks = Paged(SPLIT_LENGTHS, heads, page_size, True, SPLIT).chunks(
        data, [1, 2, 100, 256, 300, 600]
    )
    assert unequal(chunks, packed(*data, SPLIT_LENGTHS, heads, SPLIT)) == 0


LONG = Heads(32, 8, 128)  # as benchmarks/kernels/attention_decode.py times them


@pytest.mark.parametrize(
    ("heads", "lengths", "split"),
    [
        *((heads, SPLIT_LENGTHS, SPLIT) for heads in SPLIT_HEADS),
        *((heads, [1500], SPLIT) for heads in SPLIT_HEADS),
        *((heads, [9500, 4700], 4608) for heads in SPLIT_HEADS),
        *((LONG, lengths, 4096) for lengths in ([32768], [32768, 32767, 16484, 32768])),
    ],
)
def test_split_decode_equals_packed(heads: Heads, lengths: list[int], split: int, unequal) -> None:
    """Replay one graph around the borders of splits, beside poison, with spare splits."""
    data = qkv(sum(lengths), heads)
    page_size = key_block(heads.dim)
    paged = Paged(lengths, heads, page_size, poison=True, split=split)
    paged.step(dict(enumerate(lengths)), *data)
    width = (-(-max(lengths) // split) + 1) * (split // page_size)  # a split more than any needs
    table = np.stack(
        [np.pad(pages, (0, width - len(pages)), mode="edge") for pages in paged.tables]
    )
    pages = torch.from_numpy(table.astype(np.int32)).to(DEVICE)
    num_keys = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    newest = [torch.zeros(len(lengths), *x.shape[1:], dtype=x.dtype, device=DEVICE) for x in data]
    nowhere = torch.full((len(lengths),), -1, device=DEVICE)

    def decode() -> Tensor:
        return PagedAttention.decode(paged.cache, pages=pages, num_keys=num_keys, slots=nowhere)(
            0, *newest
        )

    decode()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    expected, ends = packed(*data, lengths, heads, split), np.cumsum(lengths)
    for back in (0, 1, 2, 5, 260):
        at = torch.from_numpy(ends - 1 - np.minimum(back, np.array(lengths) - 1)).to(DEVICE)
        num_keys.copy_(torch.tensor(np.maximum(np.array(lengths) - back, 1)))
        newest[0].copy_(data[0][at])
        graph.replay()
        assert unequal(out, expected[at]) == 0


@pytest.mark.parametrize("heads", SPLIT_HEADS)
def test_splits_leave_short_sequences_alone(heads: Heads, unequal) -> None:
    """Splits change long sequences, and another size changes them otherwise: the controls."""
    data = qkv(sum(SPLIT_LENGTHS), heads)
    cut, whole, other = (
        packed(*data, SPLIT_LENGTHS, heads, split) for split in (SPLIT, 0, 2 * SPLIT)
    )
    position = torch.cat([torch.arange(n) for n in SPLIT_LENGTHS])
    assert unequal(cut[position < SPLIT], whole[position < SPLIT]) == 0
    assert unequal(other[position < 2 * SPLIT], whole[position < 2 * SPLIT]) == 0
    assert unequal(cut[position >= SPLIT], whole[position >= SPLIT]) > 0
    assert unequal(cut[position >= 2 * SPLIT], other[position >= 2 * SPLIT]) > 0
    assert (cut - whole).float().norm() / whole.float().norm() < 4e-3


@pytest.mark.parametrize("heads", SPLIT_HEADS)
@pytest.mark.parametrize("padding", [0, 8])
def test_gradients_in_splits(heads: Heads, padding: int) -> None:
    lengths = [700, 40, 260]
    grads = []
    for split in (SPLIT, 0):
        leaves = each(qkv(sum(lengths) + padding, heads), Tensor.requires_grad_)
        out = packed(*leaves, lengths, heads, split)
        push = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        push[sum(lengths) :] = 0
        out.backward(push)
        grads.append([gradient(x).double() for x in leaves])
    for cut, whole in zip(*grads, strict=True):
        assert (cut - whole).norm() / whole.norm() < 1e-2


def test_control_stale_key_fails(unequal) -> None:
    heads, lengths = HEADS[0], [80]
    data = qkv(80, heads)
    paged = Paged(lengths, heads, 16)
    paged.step({0: 79}, *data)
    paged.cache.data[0, 0, paged.tables[0][0], 0] *= 1.05
    rows, last = paged.step({0: 1}, *data)
    assert unequal(last, packed(*data, lengths, heads)[rows]) > 0


def test_control_other_kernel_fails(monkeypatch: pytest.MonkeyPatch, unequal) -> None:
    heads, lengths = HEADS[0], [300, 65]
    data = qkv(365, heads)
    expected = packed(*data, lengths, heads)
    monkeypatch.setattr("spmd_rl.kernels.attention.backend.flash_supports", lambda *_: False)
    assert unequal(packed(*data, lengths, heads)[:365], expected) > 0


def test_contract_names_the_kernel() -> None:
    assert "flash-attn-4" in str(contract(DEVICE, torch.bfloat16, 128)["attention"])
    assert contract(DEVICE, torch.bfloat16, 80)["attention"] == "keys in ascending blocks"
    assert contract(DEVICE, torch.float32)["attention"] == "keys in ascending blocks"

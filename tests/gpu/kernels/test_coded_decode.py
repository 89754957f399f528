"""Decode attention over pages of codes: the bits of attention to the numbers they stand for, which
are those of the trainer.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import PagedAttention
from spmd_rl.kernels.attention.flash import DecodeFlash
from spmd_rl.kernels.attention.flash_decode import decode_attention
from spmd_rl.kernels.attention.flash_split_kv import DecodeSplits
from spmd_rl.kernels.low_precision.kv_codes import decode_pages
from tests.gpu.kernels.paged_case import DEVICE, qkv
from tests.unit.kernels import paged_case
from tests.unit.kernels.paged_case import Heads, packed

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="the kernel is for Hopper",
)
PAGE = 128
EXPONENTS = (1, -2)
NAN_CODE = 0x7F
EDGES = [1, 2, 31, 32, 33, 127, 128, 129, 160, 255, 256, 257, 700, 1500]
HEADS = [Heads(16, 8, 128), Heads(32, 8, 128), Heads(14, 2, 64), Heads(9, 3, 96), Heads(4, 4, 32)]


class Coded:
    """Sequences whose keys and values lie in pages of random codes, in random order."""

    def __init__(
        self, lengths: list[int], heads: Heads, exponents: tuple[int, int] = EXPONENTS
    ) -> None:
        generator = torch.Generator(DEVICE).manual_seed(len(lengths))
        counts = [-(-n // PAGE) for n in lengths]
        order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
        tables = np.split(order, np.cumsum(counts)[:-1])
        table = np.stack([np.pad(own, (0, max(counts) - len(own)), mode="edge") for own in tables])
        self.pages = torch.from_numpy(table).to(DEVICE)
        self.num_keys = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        shape = 2, sum(counts), PAGE, heads.key, heads.dim
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE, generator=generator)
        is_large = (codes & 0x7F) > 0x48  # of magnitudes above 4
        self.codes = torch.where(is_large, codes & 0x87, codes)
        self.exponents = exponents
        rows = len(lengths), heads.query, heads.dim
        self.q = torch.randn(rows, device=DEVICE, generator=generator).bfloat16()
        self.tile_counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def numbers(self) -> list[Tensor]:
        every = torch.arange(self.codes.shape[1], device=DEVICE)
        return [
            decode_pages(codes[None], every, exponent, torch.bfloat16)[0]
            for codes, exponent in zip(self.codes, self.exponents, strict=True)
        ]

    def of_codes(self, split: int = 0) -> Tensor:
        return self._kernel(split, self.exponents)(self.q, *self.codes)

    def of_numbers(self, split: int = 0) -> Tensor:
        keys, values = self.numbers()
        return self._kernel(split, None)(self.q, keys, values)

    def _kernel(self, split: int, exponents: tuple[int, int] | None) -> DecodeFlash | DecodeSplits:
        given = self.num_keys, self.tile_counter
        if not split:
            return DecodeFlash(self.pages, *given, exponents)
        spare = -self.pages.shape[1] % (split // PAGE)
        pages = torch.nn.functional.pad(self.pages, (0, spare))
        return DecodeSplits(pages, *given, PAGE, split, exponents)


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [*((heads, EXPONENTS) for heads in HEADS), (HEADS[0], (0, 0)), (HEADS[0], (-32, 32))],
)
def test_codes_have_the_bits_of_their_numbers(
    heads: Heads, exponents: tuple[int, int], unequal
) -> None:
    for lengths in (EDGES, *([length] for length in EDGES)):
        case = Coded(lengths, heads, exponents)
        assert unequal(case.of_codes(), case.of_numbers()) == 0
        assert case.tile_counter.item() == 0


def test_every_code_becomes_its_number() -> None:
    """One key has the whole weight, so its value is what comes out."""
    case = Coded([1], Heads(8, 8, 128))
    page = case.codes[1, case.pages[0, 0].long(), 0]
    page.copy_(torch.arange(page.numel(), device=DEVICE).view(page.shape) % 256)
    found, wanted = case.of_codes()[0], case.numbers()[1][case.pages[0, 0].long(), 0]
    assert wanted.isnan().sum() == 2 * page.numel() // 256
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[~found.isnan()], wanted[~wanted.isnan()])


@pytest.mark.parametrize("heads", HEADS[:3])
def test_many_sequences_have_these_bits_in_every_call(heads: Heads, unequal) -> None:
    lengths = np.random.default_rng(1).integers(1, 1200, 300).tolist()
    case = Coded(lengths, heads)
    wanted = case.of_numbers()
    out = case.of_codes()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.of_codes()
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert unequal(out, wanted) == 0
        assert case.tile_counter.item() == 0


@pytest.mark.parametrize("lengths", [[1500], [1, 255, 256, 257, 512, 700, 1500] * 20])
@pytest.mark.parametrize("heads", HEADS)
def test_splits_have_these_bits(heads: Heads, lengths: list[int], unequal) -> None:
    case = Coded(lengths, heads)
    assert unequal(case.of_codes(256), case.of_numbers(256)) == 0


@pytest.mark.parametrize("heads", HEADS[:3])
def test_controls_one_key_and_one_scale_are_seen(heads: Heads, unequal) -> None:
    case = Coded(EDGES, heads)
    wanted = case.of_numbers()
    for kind in range(2):
        case.codes[kind, case.pages[5, 0].long(), 100, 0] ^= 0x18  # of all elements of a row
        found = case.of_codes()
        assert unequal(found[5], wanted[5]) > 0
        assert unequal(found[:5], wanted[:5]) + unequal(found[6:], wanted[6:]) == 0
        case.codes[kind, case.pages[5, 0].long(), 100, 0] ^= 0x18
        exponents = list(EXPONENTS)
        exponents[kind] += 1
        case.exponents = exponents[0], exponents[1]
        assert unequal(case.of_codes(), wanted) > 0
        case.exponents = EXPONENTS


@pytest.mark.parametrize("kind", range(2))
def test_a_code_that_is_no_number_stays_none(kind: int) -> None:
    case = Coded(EDGES, HEADS[0])
    case.codes[kind, case.pages[5, 0].long(), 100, 0, 3] = NAN_CODE
    for found in (case.of_codes(), case.of_numbers()):
        group = HEADS[0].query // HEADS[0].key
        assert found[5, :group, 3 if kind else slice(None)].isnan().all()
        assert not found[5, group:].isnan().any() and not found[:5].isnan().any()


def test_rows_that_are_not_in_use_are_not_seen(unequal) -> None:
    case = Coded([100, 130, 1], HEADS[0])
    wanted = case.of_numbers()
    for pages, length in zip(case.pages, case.num_keys.tolist(), strict=True):
        newest, used = divmod(length - 1, PAGE)
        case.codes[:, pages[newest].long(), (used // 32 + 1) * 32 :] = NAN_CODE
    assert unequal(case.of_codes(), wanted) == 0


def test_no_keys() -> None:
    case = Coded([200, 200], HEADS[0])
    case.num_keys.copy_(torch.tensor([0, 1]))
    out = torch.full_like(case.q, torch.nan)
    log_sum = torch.empty(out.shape[:2], device=DEVICE)
    keys, values = case.codes
    given = case.pages, case.num_keys, case.tile_counter, out, log_sum
    decode_attention(case.q, keys, values, *given, EXPONENTS)
    group = HEADS[0].query // HEADS[0].key
    value = case.numbers()[1][case.pages[1, 0].long(), 0].repeat_interleave(group, dim=0)
    assert torch.equal(out, torch.stack([torch.zeros_like(value), value]))
    assert (log_sum[0] == -torch.inf).all()


@pytest.mark.parametrize("split", [0, 256])
@pytest.mark.parametrize("heads", HEADS[:3])
def test_decoding_has_the_bits_of_the_trainer(heads: Heads, split: int, unequal) -> None:
    """The newest keys and values are written as codes too, beside a row that stands for nobody."""
    lengths = [5, 127, 129, 300, 700]
    data, ends = qkv(sum(lengths), heads), np.cumsum(lengths)
    paged = paged_case.Paged(
        lengths, heads, PAGE, split=split, exponents=EXPONENTS, dtype=torch.bfloat16, device=DEVICE
    )
    paged.step({i: length - 1 for i, length in enumerate(lengths)}, *data)
    tables = [*paged.tables, paged.tables[0]]
    table = np.stack([np.pad(own, (0, 6 - len(own)), mode="edge") for own in tables])
    slots = [own[-1] * PAGE + (n - 1) % PAGE for own, n in zip(paged.tables, lengths, strict=True)]
    attend = PagedAttention.decode(
        paged.cache,
        pages=torch.from_numpy(table.astype(np.int32)).to(DEVICE),
        num_keys=torch.tensor([*lengths, 1], dtype=torch.int32, device=DEVICE),
        slots=torch.tensor([*slots, -1], device=DEVICE),
    )
    at = torch.from_numpy(np.append(ends, 1) - 1).to(DEVICE)
    found = attend(0, *(x[at] for x in data))[:-1]
    assert unequal(found, packed(*data, lengths, heads, split, EXPONENTS)[at[:-1]]) == 0
    assert unequal(found, packed(*data, lengths, heads, split)[at[:-1]]) > 0
    stored = 2 * sum(lengths) * heads.key * heads.dim
    assert paged.cache.code_counts()["num_coded"] == stored

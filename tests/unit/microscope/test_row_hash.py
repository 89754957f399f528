"""A row's hash is a function of its bits and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd_rl.kernels.rowwise.row_hash as row_hash
from spmd_rl.kernels.rowwise.row_hash import row_hashes

rows = st.integers(1, 40).flatmap(
    lambda width: st.lists(st.integers(0, 2**32 - 1), min_size=width, max_size=width)
)


def as_row(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array([bits], np.uint32).view(np.float32))


@given(rows)
def test_the_hash_is_the_sum_of_mixed_columns_and_bits(bits: list[int]) -> None:
    total = 0
    for column, value in enumerate(bits, 1):
        signed = value - 2**32 if value >= 2**31 else value
        x = (column * 0x9E3779B97F4A7C15 + signed * 0xD1342543DE82EF95) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        total += x ^ (x >> 31)
    assert int(row_hashes(as_row(bits))[0]) % 2**64 == total % 2**64


@settings(max_examples=200)
@given(rows, st.data())
def test_one_bit_anywhere_changes_it(bits: list[int], data: st.DataObject) -> None:
    at, bit = data.draw(st.integers(0, len(bits) - 1)), data.draw(st.integers(0, 31))
    other = list(bits)
    other[at] ^= 1 << bit
    assert row_hashes(as_row(bits)) != row_hashes(as_row(other))


@given(rows)
def test_columns_are_told_apart(bits: list[int]) -> None:
    turned = bits[1:] + bits[:1]
    assert (row_hashes(as_row(bits)) == row_hashes(as_row(turned))).item() == (turned == bits)


def test_rows_beside_it_their_layout_and_chunks_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(300, 33, generator=torch.Generator().manual_seed(0))
    whole = row_hashes(x)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert torch.equal(row_hashes(x[order]), whole[order])
    assert torch.equal(row_hashes(x.t().contiguous().t()), whole)
    monkeypatch.setattr(row_hash, "CHUNK_ELEMENTS", 100)
    assert torch.equal(row_hashes(x), whole)
    assert len(whole.unique()) == 300


def test_bfloat16_is_hashed_as_the_float32_it_is() -> None:
    x = torch.randn(16, 24).bfloat16()
    x[0, 0], x[0, 1], x[0, 2] = -0.0, torch.inf, 1e-40
    assert torch.equal(row_hashes(x), row_hashes(x.float()))
    assert not torch.equal(row_hashes(torch.tensor([[0.0]])), row_hashes(torch.tensor([[-0.0]])))

"""Shared parts of the kernels' tests: row counts, test data, and comparison by bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

NUM_ROWS = (
    1,
    2,
    7,
    8,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    129,
    255,
    256,
    257,
    1000,
    2048,
    8192,
)
RowOp = Callable[[Tensor], Tensor]


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


@pytest.fixture(scope="session")
def unequal() -> Callable[[Tensor, Tensor], int]:
    """Return a function that counts the elements that differ in any bit."""
    return lambda x, y: int((_bits(x) != _bits(y)).sum())


@pytest.fixture(scope="session")
def unequal_rows() -> Callable[[RowOp, Tensor], int]:
    """Elements of `op`'s rows that change with the rows beside them: every count, shuffled, aligned
    or not.
    """

    def count(op: RowOp, x: Tensor) -> int:
        whole, differ = _bits(op(x)), 0
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
        for rows in NUM_ROWS:
            if rows <= len(x):
                differ += int((_bits(op(x[order[:rows]])) != whole[order[:rows]]).sum())
                differ += int((_bits(op(x[-rows:])) != whole[-rows:]).sum())
        return differ

    return count


@pytest.fixture(scope="session")
def rows() -> Callable[..., Tensor]:
    """Test data on the GPU, by kind: where sums lose bits, their order shows."""

    def make(kind: str, num_rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(num_rows + columns)
        x = torch.randn(num_rows, columns, device="cuda", generator=generator)
        if kind == "wide":
            x *= torch.exp2(
                torch.randint(-20, 20, x.shape, device="cuda", generator=generator).float()
            )
        elif kind == "cancelling":
            sign = torch.where(torch.arange(columns, device="cuda") % 2 == 0, 1024.0, -1024.0)
            x = torch.where(x > 0.5, x * 2**-15, sign)
        elif kind == "tiny":
            x *= 2.0**-126
        return x.to(dtype)

    return make

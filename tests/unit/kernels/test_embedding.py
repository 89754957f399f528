"""The embedding copies the table's rows, and its gradient is a product with one-hot rows."""

from __future__ import annotations

import pytest
import torch

from spmd_rl.kernels import embed

VOCAB, COLUMNS = 11, 6
TABLE = torch.randn(VOCAB, COLUMNS, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (17,), (3, 5), (2, 1, 4)])
def test_rows_and_gradient_against_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    table = TABLE.to(dtype, copy=True).requires_grad_()
    ids = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))
    out = embed(ids, table)
    assert out.dtype == dtype
    assert torch.equal(out.double(), table.detach().double()[ids])

    # sums are exact
    push = torch.randint(-4, 5, out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    out.backward(push)
    one_hot = (ids.reshape(-1, 1) == torch.arange(VOCAB)).double()
    assert torch.equal(table.grad.double(), one_hot.t() @ push.double().reshape(-1, COLUMNS))


@pytest.mark.parametrize("outside", [-1, VOCAB])
def test_an_id_outside_the_table_raises(outside: int) -> None:
    with pytest.raises(IndexError, match="out of range"):
        embed(torch.tensor([0, outside]), TABLE)

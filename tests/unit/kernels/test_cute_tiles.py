"""GPUs on which the contract's products run."""

from __future__ import annotations

import pytest
import torch

from spmd_rl.kernels.linear.linear import keeps_chain

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((9, 0), torch.bfloat16, True),
        ((10, 0), torch.bfloat16, True),
        ((8, 0), torch.bfloat16, False),
        ((12, 0), torch.bfloat16, False),
        ((9, 0), torch.float32, False),
    ],
)
def test_tiles_are_launched_where_they_have_room(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    keeps_chain.cache_clear()
    assert keeps_chain(dtype, DEVICE) is expected
    keeps_chain.cache_clear()

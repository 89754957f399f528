"""Programs of a copy that runs beside transfers of NCCL."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from spmd_rl.kernels.runtime import copy_triton


@pytest.mark.parametrize(("count", "programs"), [(132, 100), (40, 20)])
def test_a_copy_beside_nccl_leaves_multiprocessors(
    monkeypatch: pytest.MonkeyPatch, count: int, programs: int
) -> None:
    facts = SimpleNamespace(multi_processor_count=count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert copy_triton.programs_beside_nccl(torch.device("cuda")) == programs


@pytest.mark.parametrize(("limit", "programs"), [(2, 2), (9, 3)])
def test_a_launch_has_no_more_programs_than_it_may(
    monkeypatch: pytest.MonkeyPatch, limit: int, programs: int
) -> None:
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(copy_triton, "_copy", Kernel())
    chunk = copy_triton.BLOCK * copy_triton.BLOCKS
    tensors = [torch.zeros(2 * chunk, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)]
    starts = [0, 4 * chunk]
    copies = copy_triton.BufferCopies(tensors, starts, torch.bfloat16, True, limit)
    copies.run(torch.zeros(4 * chunk + 16, dtype=torch.uint8))
    assert grids == [(programs,)]

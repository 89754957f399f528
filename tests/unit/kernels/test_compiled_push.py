"""Hopper code of a push's kernels: wide loads and stores, and one rounding of masters."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from spmd_rl.kernels.runtime import copy_triton, digest_triton
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.memory_rows import memory_rows
from tests.unit.kernels.compiled import ptx_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton has no compiler elsewhere")

SIZE = 5000


@pytest.fixture(autouse=True)
def _compiled_here(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither use nor leave behind compiled kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return


def test_masters_are_copied_in_wide_loads_and_stores() -> None:
    pair = torch.zeros(SIZE, dtype=torch.bfloat16), torch.zeros(SIZE)
    ptx = ptx_of(copy_triton._copy, lambda: copy_triton.copy_all([pair]))
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert "cvt.rn.bf16x2.f32" in ptx


@pytest.mark.parametrize("to_buffer", [True, False])
def test_buckets_are_packed_and_unpacked_in_wide_loads_and_stores(to_buffer: bool) -> None:
    tensors = [torch.zeros(SIZE, dtype=torch.bfloat16)]
    copies = copy_triton.BufferCopies(tensors, [0], torch.bfloat16, to_buffer, 2)
    buffer = torch.zeros(2 * SIZE, dtype=torch.uint8)
    ptx = ptx_of(copy_triton._copy, lambda: copies.run(buffer))
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


@pytest.mark.parametrize(
    ("held", "to"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_digests_read_in_wide_loads(held: torch.dtype, to: torch.dtype) -> None:
    tensor = LocalTensors.whole({"w": torch.zeros(SIZE, dtype=held)})["w"]
    rows = [digest_triton.Rows(*row) for row in memory_rows(tensor, 0) or ()]
    sums = torch.zeros(1, dtype=torch.int64)
    digests = digest_triton.RowDigests(rows, held, to, sums.device)
    ptx = ptx_of(digest_triton._add_digests, lambda: digests.add_to(sums))
    assert "ld.global.v4.b32" in ptx
    assert ("cvt.rn.bf16x2.f32" in ptx) is (held != to)
    assert "atom.global.gpu.relaxed.add.u64" in ptx

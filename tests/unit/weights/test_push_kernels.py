"""The CUDA kernels of a push, as C++ on the CPU: the bits of the sums and copies of torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels.runtime.row_digests import RowDigests, Rows
from spmd_rl.kernels.runtime.run_copies import BufferCopies, copy_all, programs_beside_nccl
from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.proof.digest import box_sums
from spmd_rl.weights.proof.memory_rows import memory_rows
from tests.unit.weights.push_on_host import COMPILER, SIZES, HostKernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is installed")

WHOLE = torch.randn(7, 6, 20, generator=torch.Generator().manual_seed(3))
# ties to even, both ways; subnormal numbers; what rounds up to infinity
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40, 3.4e38, 1.00390625, 1.01171875])
SIZES_OF_TENSORS = (1, 16, 47, 48, 49, 97, 840)
CASTS = {
    "float32": (torch.float32, "float32"),
    "float32 to bfloat16": (torch.float32, "bfloat16"),
    "bfloat16": (torch.bfloat16, "bfloat16"),
    "float16": (torch.float16, "float16"),
    "uint8": (torch.uint8, "uint8"),
    "int64": (torch.int64, "int64"),
}
# views of WHOLE, with the offset and the shape of the tensor that each is a box of
BOXES: dict[str, tuple[tuple[slice | int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "whole": ((), (7, 6, 20), (0, 0, 0)),
    "rows": ((slice(2, 5),), (7, 6, 20), (2, 0, 0)),
    "middle": ((slice(None), slice(1, 4)), (7, 6, 20), (0, 1, 0)),
    "columns": ((slice(1, 6), slice(2, 5), slice(3, 19)), (7, 6, 20), (1, 2, 3)),
    "aligned columns": ((slice(1, 6), slice(0, 6), slice(0, 16)), (7, 6, 20), (1, 0, 0)),
    "matrix": ((0, slice(1, 5), slice(5, 9)), (9, 30), (4, 11)),
    "one column": ((0, slice(None), slice(5, 6)), (6, 20), (0, 5)),
    "vector": ((0, 0, slice(3, 17)), (100,), (71,)),
    "scalar": ((0, 0, 0), (), ()),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def _on_host(kernels: HostKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.use(monkeypatch)


def boxes(cast: str) -> list[LocalTensor]:
    dtype, _ = CASTS[cast]
    whole, special = WHOLE, SPECIAL
    if not dtype.is_floating_point:
        whole, special = (WHOLE * 20).abs(), SPECIAL.abs().clamp(0, 9)
    whole, special = whole.to(dtype), special.to(dtype)
    made = [
        LocalTensor(shape, Box(offset, tuple(whole[index].shape)), whole[index])
        for index, shape, offset in BOXES.values()
    ]
    return [*made, LocalTensor((8,), Box((0,), (8,)), special)]


@pytest.mark.parametrize("cast", CASTS)
def test_the_kernel_adds_up_the_same_sums(cast: str) -> None:
    found, to = boxes(cast), CASTS[cast][1]
    sums = torch.zeros(len(found), dtype=torch.int64)
    rows = [
        Rows(*row) for number, box in enumerate(found) for row in memory_rows(box, number) or ()
    ]
    RowDigests(rows, CASTS[cast][0], getattr(torch, to), sums.device).add_to(sums)
    expected = box_sums(found, [to] * len(found))
    assert sums.tolist() == expected.tolist()
    assert len(set(expected.tolist())) == len(found)


def between_guards(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return room for a tensor that begins where wide stores can, and has 16 bytes beside it."""
    return torch.full((tensor.numel() + 32 // dtype.itemsize,), 7.0, dtype=dtype)


def inside(wide: Tensor) -> Tensor:
    """Return the room without its guards, and check that nothing was written to these."""
    guard = 16 // wide.element_size()
    assert (wide[:guard] == 7).all() and (wide[-guard:] == 7).all()
    return wide[guard:-guard]


def test_a_copy_of_many_tensors_writes_them_and_nothing_else() -> None:
    tensors = [WHOLE.view(-1)[:size].clone() for size in SIZES_OF_TENSORS] + [SPECIAL]
    wide = [between_guards(one, torch.bfloat16) for one in tensors]
    copy_all([(inside(one), tensor) for one, tensor in zip(wide, tensors, strict=True)])
    for tensor, one in zip(tensors, wide, strict=True):
        assert torch.equal(inside(one), tensor.bfloat16())


@pytest.mark.parametrize(
    ("held", "dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_a_buffer_takes_many_tensors_and_gives_them_back(
    held: torch.dtype, dtype: torch.dtype
) -> None:
    """The copies are prepared once for two buffers, with fewer blocks than chunks."""
    tensors = [WHOLE.to(held).view(-1)[:size].clone() for size in SIZES_OF_TENSORS]
    starts, size = [], 16
    for one in tensors:
        starts.append(size)
        size += -(-one.numel() * dtype.itemsize // 16) * 16
    buffers = [torch.full((size + 16,), 7, dtype=torch.uint8) for _ in range(2)]
    packing = BufferCopies(tensors, starts, dtype, to_buffer=True, max_programs=4)
    for buffer in buffers:
        packing.run(buffer)
    wide = [between_guards(one, dtype) for one in tensors]
    targets = [inside(one) for one in wide]
    BufferCopies(targets, starts, dtype, to_buffer=False, max_programs=100).run(buffers[1])
    buffer, written = buffers[0], torch.zeros(size + 16, dtype=torch.bool)
    for tensor, start, one in zip(tensors, starts, wide, strict=True):
        num_bytes = tensor.numel() * dtype.itemsize
        written[start : start + num_bytes] = True
        assert torch.equal(buffer[start : start + num_bytes].view(dtype), tensor.to(dtype))
        assert torch.equal(inside(one), tensor.to(dtype))
    assert (buffer[~written] == 7).all()


@pytest.mark.parametrize(("count", "programs"), [(132, 100), (40, 20)])
def test_a_copy_beside_nccl_leaves_multiprocessors(
    monkeypatch: pytest.MonkeyPatch, count: int, programs: int
) -> None:
    facts = SimpleNamespace(multi_processor_count=count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert programs_beside_nccl(torch.device("cuda")) == programs


@pytest.mark.parametrize(("limit", "num_blocks"), [(2, 2), (9, 3)])
def test_a_launch_has_no_more_blocks_than_it_may(
    kernels: HostKernels, limit: int, num_blocks: int
) -> None:
    chunk = SIZES["COPY_CHUNK"]
    tensors = [torch.zeros(2 * chunk, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)]
    copies = BufferCopies(tensors, [0, 4 * chunk], torch.bfloat16, True, limit)
    copies.run(torch.zeros(4 * chunk + 16, dtype=torch.uint8))
    assert kernels.num_blocks[-1] == num_blocks

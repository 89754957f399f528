"""The GPU kernels of a push in Triton's interpreter: the bits of the sums and copies of torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmd_rl.weights.digest import box_sums
from spmd_rl.weights.layout import Box
from spmd_rl.weights.local_tensors import LocalTensor

pytest.importorskip("triton")

from tests.unit.kernels.interpreted import Calls, results

WHOLE = torch.randn(7, 6, 20, generator=torch.Generator().manual_seed(3))
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40, 3.4e38, 1.0039062, 1.0117188])
CASTS = {
    "float32": (torch.float32, "float32"),
    "float32 to bfloat16": (torch.float32, "bfloat16"),
    "bfloat16": (torch.bfloat16, "bfloat16"),
    "uint8": (torch.uint8, "uint8"),
}
# views of WHOLE, with the offset and the shape of the tensor that each is a box of
BOXES: dict[str, tuple[tuple[slice | int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "whole": ((), (7, 6, 20), (0, 0, 0)),
    "rows": ((slice(2, 5),), (7, 6, 20), (2, 0, 0)),
    "middle": ((slice(None), slice(1, 4)), (7, 6, 20), (0, 1, 0)),
    "columns": ((slice(1, 6), slice(2, 5), slice(3, 19)), (7, 6, 20), (1, 2, 3)),
    "matrix": ((0, slice(1, 5), slice(5, 9)), (9, 30), (4, 11)),
    "one column": ((0, slice(None), slice(5, 6)), (6, 20), (0, 5)),
    "vector": ((0, 0, slice(3, 17)), (100,), (71,)),
    "scalar": ((0, 0, 0), (), ()),
}


def views(cast: str) -> list[Tensor]:
    """Boxes of the first dtype. Those that are cast need no rounding, as the interpreter cuts off
    the bits; tests/gpu rounds.
    """
    dtype, to = CASTS[cast]
    whole, special = WHOLE, SPECIAL
    if dtype == torch.uint8:
        whole, special = (WHOLE * 20).abs(), SPECIAL.abs().clamp(0, 9)
    elif to == "bfloat16":
        whole, special = WHOLE.bfloat16(), SPECIAL.where(SPECIAL.abs() != 1e-40, 0.5).bfloat16()
    whole, special = whole.to(dtype), special.to(dtype)
    return [*(whole[index] for index, _, _ in BOXES.values()), special]


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    shapes = [*(shape for _, shape, _ in BOXES.values()), (8,)]
    offsets = [*(offset for _, _, offset in BOXES.values()), (0,)]
    arguments = [(views(cast), shapes, offsets, to) for cast, (_, to) in CASTS.items()]
    calls = Calls("tests.unit.weights.kernel_case", "kernel_sums", {}, arguments)
    found = results(calls, tmp_path_factory.mktemp("digests"))
    return dict(zip(CASTS, found, strict=True))


@pytest.mark.parametrize("cast", CASTS)
def test_the_kernel_adds_up_the_same_sums(sums: dict[str, Tensor], cast: str) -> None:
    boxes = [
        LocalTensor(shape, Box(offset, tuple(view.shape)), view)
        for view, (_, shape, offset) in zip(views(cast), BOXES.values(), strict=False)
    ]
    boxes.append(LocalTensor((8,), Box((0,), (8,)), views(cast)[-1]))
    expected = box_sums(boxes, [CASTS[cast][1]] * len(boxes))
    for name, found, value in zip([*BOXES, "special"], sums[cast], expected, strict=True):
        assert found == value, name
    assert len(set(expected.tolist())) == len(boxes)


def test_a_copy_of_many_tensors_writes_them_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tensors = [WHOLE.bfloat16().float().view(-1)[:size] for size in (1, 16, 47, 48, 49, 97, 840)]
    calls = Calls("tests.unit.weights.kernel_case", "copied", {}, [(tensors,)])
    (found,) = results(calls, tmp_path_factory.mktemp("copies"))
    for tensor, wide in zip(tensors, found, strict=True):
        assert torch.equal(wide[8:-8], tensor.bfloat16())
        assert (wide[:8] == 7).all()
        assert (wide[-8:] == 7).all()


@pytest.mark.parametrize(
    ("held", "dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_a_buffer_takes_many_tensors_and_gives_them_back(
    tmp_path: Path, held: torch.dtype, dtype: torch.dtype
) -> None:
    sizes = (1, 16, 47, 48, 49, 97, 840)
    tensors = [WHOLE.bfloat16().to(held).view(-1)[:size] for size in sizes]
    calls = Calls("tests.unit.weights.kernel_case", "through_buffer", {}, [(tensors, dtype)])
    ((buffer, found),) = results(calls, tmp_path)
    start = 16
    for tensor, wide in zip(tensors, found, strict=True):
        num_bytes = tensor.numel() * dtype.itemsize
        part, end = buffer[start : start + num_bytes], start + -(-num_bytes // 16) * 16
        assert torch.equal(part.view(dtype), tensor.to(dtype))
        assert (buffer[start + num_bytes : end] == 7).all()
        assert torch.equal(wide[8:-8], tensor.to(dtype))
        assert (wide[:8] == 7).all() and (wide[-8:] == 7).all()
        start = end
    assert (buffer[:16] == 7).all() and (buffer[start:] == 7).all()

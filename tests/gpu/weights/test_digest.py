"""Digests on a GPU: the bits of the CPU's sums, for all boxes in one launch; pushes that prove
themselves there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels.runtime.cuda_kernels import has_cupy
from spmd_rl.kernels.runtime.row_digests import RowDigests
from spmd_rl.weights.copies import copy_all
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import alias, execute
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors
from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.plan.moves import plan_moves
from spmd_rl.weights.proof.digest import box_sums
from spmd_rl.weights.proof.verdict import Verification
from spmd_rl.weights.proof.verification import Verifier
from spmd_rl.weights.tensor_ends import TensorSource
from tests.gpu.rollout.graph_case import DEVICE, new_engine, new_model

pytestmark = pytest.mark.skipif(not has_cupy(), reason="pip install -e '.[gpu]'")

CASTS = [
    (torch.float32, "float32"),
    (torch.float32, "bfloat16"),
    (torch.bfloat16, "bfloat16"),
    (torch.float16, "float16"),
    (torch.uint8, "uint8"),
    (torch.bfloat16, "float32"),  # no kernel has it: torch adds up
]
# rounding to bfloat16: ties to even, up to infinity, subnormal numbers
ROUNDED = torch.tensor(
    [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x00008000, 0x00018000, 0x7F800000]
).to(torch.int32)


def boxes(dtype: torch.dtype) -> list[LocalTensor]:
    """Whole tensors, rows, columns, blocks, a scalar and what rounding does to special numbers."""
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(300, 7, 1111, generator=generator) * 30
    large = torch.randn(9_000_001, generator=generator)
    whole, large = (one.abs() if dtype == torch.uint8 else one for one in (whole, large))
    whole, large = whole.to(dtype), large.to(dtype)
    special = ROUNDED.view(torch.float32)
    if dtype != torch.float32:
        special = torch.arange(8).to(dtype)
    shape, matrix = tuple(whole.shape), whole[:, 3]
    return [
        LocalTensor(shape, Box((0, 0, 0), shape), whole),
        LocalTensor(shape, Box((17, 0, 0), (100, 7, 1111)), whole[17:117]),
        LocalTensor(shape, Box((0, 2, 9), (300, 3, 1001)), whole[:, 2:5, 9:1010]),
        LocalTensor((300, 2222), Box((0, 1111), (300, 1111)), matrix.clone()),
        LocalTensor((300, 1111), Box((0, 0), (300, 1111)), matrix),
        LocalTensor((300, 1111), Box((5, 7), (1, 1)), matrix[5:6, 7:8]),
        LocalTensor(tuple(large.shape), Box((0,), (9_000_001,)), large),
        LocalTensor((), Box((), ()), large[3]),
        LocalTensor((4, 4), Box((4, 0), (0, 4)), large[:0].view(0, 4)),
        LocalTensor((8,), Box((0,), (8,)), special),
    ]


@pytest.mark.parametrize(("dtype", "to"), CASTS, ids=str)
def test_the_gpu_adds_up_the_sums_of_the_cpu(dtype: torch.dtype, to: str) -> None:
    on_cpu = boxes(dtype)
    on_gpu = [replace(box, local=box.local.cuda()) for box in on_cpu]
    # views stay views of a larger tensor
    whole = on_gpu[0].local
    on_gpu[1] = replace(on_gpu[1], local=whole[17:117])
    on_gpu[2] = replace(on_gpu[2], local=whole[:, 2:5, 9:1010])
    on_gpu[4] = replace(on_gpu[4], local=whole[:, 3])
    on_gpu[5] = replace(on_gpu[5], local=whole[:, 3][5:6, 7:8])
    targets = [to] * len(on_cpu)
    assert box_sums(on_gpu, targets).tolist() == box_sums(on_cpu, targets).tolist()


def test_columns_that_do_not_lie_side_by_side_are_summed_too() -> None:
    tensor = torch.randn(64, 48)
    box = LocalTensor((48, 64), Box((0, 0), (48, 64)), tensor.T)
    on_gpu = replace(box, local=tensor.cuda().T)
    assert box_sums([on_gpu], ["bfloat16"]).tolist() == box_sums([box], ["bfloat16"]).tolist()


def test_all_boxes_of_two_dtypes_are_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    add = RowDigests.add_to

    def counted(rows: RowDigests, sums: Tensor) -> None:
        launches.append(len(rows._table))
        add(rows, sums)

    monkeypatch.setattr(RowDigests, "add_to", counted)
    tensors = [torch.randn(5, 5, device=DEVICE) for _ in range(300)]
    whole = list(LocalTensors.whole({str(i): one for i, one in enumerate(tensors)}).values())
    box_sums(whole, ["bfloat16"] * 150 + ["float32"] * 150)
    assert launches == [150, 150]


def compared(ends: LocalEnds) -> Verification:
    source, sink = ends.the_source(), ends.the_sink()
    plan = plan_moves([source.layout(0)], [sink.layout(0)], None, 0)
    execute(plan.moves, ends, None)
    return Verifier(plan.moves, plan.replicas, ends).compare(None)


def test_a_push_to_the_engine_proves_itself() -> None:
    engine = new_engine(new_model(0))
    masters = {name: p.float() for name, p in new_model(1).named_parameters()}
    masters = {name: p + torch.randn_like(p) * 1e-3 for name, p in masters.items()}
    source = TensorSource(LocalTensors.whole(masters).items())
    ends = LocalEnds(0, source, engine.sink(), DEVICE)
    assert not alias(source, ends.the_sink(), 0)
    found = compared(ends)
    assert (found.num_equal, found.num_unequal, found.num_unknown) == (len(masters), 0, 0)
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, masters[name].bfloat16())
    name, parameter = next(iter(engine.model.named_parameters()))
    parameter.view(torch.uint8).view(-1)[12345] ^= 1
    layout = ends.the_sink().layout(0)
    plan = plan_moves([source.layout(0)], [layout], None, 0)
    wrong = Verifier(plan.moves, plan.replicas, ends).compare(None)
    assert [one.name for one in wrong.mismatches] == [name]
    assert wrong.num_equal == len(masters) - 1


def test_masters_are_rounded_as_torch_rounds_them() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [1, 7, 4096, 100_000, 3_000_001]
    tensors = [torch.randn(size, device=DEVICE, generator=generator) for size in sizes]
    tensors[2][:8] = ROUNDED.view(torch.float32).to(DEVICE)
    odd = torch.randn(64, 65, device=DEVICE)
    tensors += [odd[:, 1:], odd.view(-1)[1:], torch.randn(0, device=DEVICE)]
    targets = [torch.full(one.shape, 9.0, device=DEVICE, dtype=torch.bfloat16) for one in tensors]
    copy_all(targets, tensors)
    for target, tensor in zip(targets, tensors, strict=True):
        assert torch.equal(target.view(torch.int16), tensor.bfloat16().view(torch.int16))


def test_lists_are_copied_with_a_cast_in_few_launches() -> None:
    """`torch._foreach_copy_` has a fast path from float32 to bfloat16."""
    targets = [torch.empty(64, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(300)]
    tensors = [torch.randn(64, 64, device=DEVICE) for _ in range(300)]
    torch._foreach_copy_(targets, tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch._foreach_copy_(targets, tensors)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if "Synchronize" not in event.name]
    assert len(kernels) < 30
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(targets, tensors, strict=True))

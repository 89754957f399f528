"""Kernels from a profile, and what their names tell."""

from __future__ import annotations

from typing import Any

import pytest

from spmd_rl.kernels.linear_tiles import Tile, choose_gated_tile, choose_tile
from spmd_rl.microscope.identity import Kernel, Kernels, between_marks, identify, kernels_of, planned
from spmd_rl.microscope.points import Point
from spmd_rl.microscope.taps import MARK


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", ("tile 64x8", "K split", "wgmma")),
        ("nvjet_sm90_tst_128x64_64x9_2x1_v_bz_TNT", ("tile 128x64", "one chain", "wgmma")),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_bias_execute_kernel",
         ("tile 64x64x64", "", "wgmma")),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>(Params)",
         ("tile 32x32_128x2", "", "mma.sync")),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams<float>)", ("", "K split", "")),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Kernel_traits<128, 64>>(Params)", ("", "keys split", "")),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at",
         ("keys in blocks of 128", "one split", "wgmma")),
        ("kernel_cutlass_kernel_spmd_rlkernelsflash_decode_cuteDecoding_object_at",
         ("keys in blocks of 128", "one split", "wgmma")),
        ("_forward", ("", "", "")),
    ],
)  # fmt: skip
def test_a_kernels_name_is_read(name: str, said: tuple[str, str, str]) -> None:
    kernel = identify(name)
    assert (kernel.tile, kernel.splits, kernel.instruction) == said
    assert len(kernel.name) <= 120
    assert "<" not in kernel.name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, x>(int, y)",
            "vectorized_elementwise_kernel add",
        ),
        (
            "void at::native::elementwise_kernel<128, 4, at::native::BinaryFunctor<MulFunctor<float> > >(int)",
            "elementwise_kernel Mul",
        ),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<x>(y)", "CatArrayBatchedCopy"),
        ("_matmul", "_matmul"),
        ("aten::linear [16,64] × [64,64]", "aten::linear [16,64] × [64,64]"),
        ("_SiluMul [48,192] × [48,192]", "_SiluMul [48,192] × [48,192]"),
    ],
)
def test_names_are_cut_to_what_they_say(name: str, short: str) -> None:
    assert identify(name).name == short


@pytest.mark.parametrize(
    ("rows", "width", "instruction"), [(16, 4096, "wgmma"), (64, 1024, "wgmma"), (256, 8192, "wgmma")]
)
def test_our_table_names_tile_and_chain(rows: int, width: int, instruction: str) -> None:
    kernel = planned(choose_tile(rows, width))
    assert kernel.tile.startswith("tile ")
    assert kernel.splits == "one chain"
    assert kernel.instruction == instruction
    assert str(kernel).startswith("Triton _matmul (tile ")


@pytest.mark.parametrize(("rows", "tile"), [(16, choose_gated_tile(16, 3072)), (256, choose_tile(256, 2 * 3072))])
def test_gate_and_up_in_one_product_have_a_tile_of_their_own(rows: int, tile: Tile) -> None:
    points = Point(0, "act"), Point(0, "down_proj")
    kernels = Kernels({(0, point): (identify("_matmul"),) for point in points}, (0,), (1,), (rows,), {})
    act, down = (kernels.at(point, 0, 3072)[0] for point in points)
    assert act == planned(tile) != down


def test_a_product_out_of_a_ring_is_named() -> None:
    kernels = Kernels({(0, Point(0, "act")): (identify("_ring_matmul"),)}, (0,), (1,), (16,), {})
    assert str(kernels.at(Point(0, "act"), 0, 3072)[0]) == "Triton _ring_matmul (weight first, one chain, wgmma)"
    shared = identify("kernel_cutlass_kernel_spmd_rlkernelslinear_cuteProduct_object_at__CopyAtom")
    assert str(shared) == "CuTe ring (weight first, one chain, wgmma)"


def event(ts: float, cat: str, name: str, **args: Any) -> dict[str, Any]:
    return {"ts": ts, "dur": 1, "cat": cat, "name": name, "args": args}


def mark(ts: float, text: str) -> dict[str, Any]:
    return event(ts, "user_annotation", f"{MARK}|{text}")


def test_kernels_belong_to_the_mark_after_their_launch_not_their_run() -> None:
    events = [
        mark(0, "0||"),
        event(1, "cuda_driver", "cuLaunchKernelEx", correlation=7),
        event(2, "cpu_op", "aten::mm"),
        mark(5, "0|3|down_proj"),
        event(6, "cuda_runtime", "cudaLaunchKernel", correlation=8),
        mark(9, "0|4|input_norm"),
        event(20, "kernel", "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", correlation=7),
        event(30, "kernel", "_forward", correlation=8),
        event(21, "gpu_user_annotation", f"{MARK}|0|4|input_norm"),
    ]
    ran = between_marks(events[::-1])
    assert set(ran) == {(0, Point(3, "down_proj")), (0, Point(4, "input_norm"))}
    assert ran[0, Point(3, "down_proj")][0].splits == "K split"
    assert ran[0, Point(4, "input_norm")] == (Kernel("Triton _forward"),)


def test_without_a_gpu_the_outermost_ops_count() -> None:
    outer = event(1, "cpu_op", "aten::linear", **{"Input Dims": [[16, 64], [64, 64], []]}) | {"dur": 3}
    events = [
        mark(0, "1||"),
        outer,
        event(2, "cpu_op", "aten::mm"),
        event(5, "cpu_op", "aten::view"),
        mark(6, "1|0|o_proj"),
    ]
    assert between_marks(events) == {(1, Point(0, "o_proj")): (Kernel("aten::linear [16,64] × [64,64]"),)}


def test_a_rows_kernels_are_those_of_its_own_pass(engine, case) -> None:
    kernels = kernels_of(engine(), case)
    prompt, decoded = int(case.offsets[2]) + 20, int(case.offsets[2]) + 100
    assert kernels.forward_of[prompt] != kernels.forward_of[decoded]
    point = Point(1, "down_proj")
    assert "[48,192]" in str(kernels.at(point, prompt, 64)[0])  # a chunk of 40, padded to the row tile
    assert "[16,192]" in str(kernels.at(point, decoded, 64)[0])
    assert kernels.at(Point(1, "k"), decoded, 32) == kernels.at(Point(1, "q"), decoded, 64)  # both end at attention

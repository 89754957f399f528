"""Kernels in a profile, and what their names say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spmd_rl.microscope.diagnose.kernel_names import KernelInfo, identify
from spmd_rl.microscope.diagnose.kernel_profile import kernels_between_marks, kernels_of
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import MARK


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", ("tile 64x8", "K split", "wgmma")),
        ("nvjet_sm90_tst_128x64_64x9_2x1_v_bz_TNT", ("tile 128x64", "one chain", "wgmma")),
        ("cutlass_90_tensorop_gemm_bf16_128x128_64x4_streamk_tn",
         ("tile 128x128_64x4", "K split", "mma.sync")),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_bias_"
         "execute_kernel",
         ("tile 64x64x64", "", "wgmma")),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_"
         "align8>(Params)",
         ("tile 32x32_128x2", "", "mma.sync")),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams<float>)",
         ("", "K split", "")),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Kernel_traits<128, 64>>(Params)",
         ("", "keys split", "")),
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
            "void at::native::vectorized_elementwise_kernel<8, "
            "at::native::CUDAFunctor_add<c10::BFloat16>, x>(int, y)",
            "vectorized_elementwise_kernel add",
        ),
        (
            "void at::native::elementwise_kernel<128, 4, "
            "at::native::BinaryFunctor<MulFunctor<float> > >(int)",
            "elementwise_kernel Mul",
        ),
        (
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy<x>(y)",
            "CatArrayBatchedCopy",
        ),
        ("_draw", "Triton _draw"),
        ("aten::linear [16,64] × [64,64]", "aten::linear [16,64] × [64,64]"),
        ("_SiluMul [48,192] × [48,192]", "_SiluMul [48,192] × [48,192]"),
    ],
)
def test_names_are_cut_to_what_they_say(name: str, short: str) -> None:
    assert identify(name).name == short


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("_matmul_64x16x256", "Triton _matmul (tile 64x16x256, one chain, wgmma)"),
        ("_matmul_16x64x256_swap",
         "Triton _matmul (tile 16x64x256, weight first, one chain, wgmma)"),
        ("_matmul_32x128x64", "Triton _matmul (tile 32x128x64, one chain, mma.sync)"),
        ("_ring_matmul_16x32x512x4",
         "Triton _ring_matmul (4 stages of tile 16x32x512, weight first, one chain, wgmma)"),
        ("shared_matmul_32x40x128x12_kernel_cutlass_kernel_spmd_rlkernelslinear_cuteProduct_"
         "object_at__CopyAtom",
         "CuTe shared_matmul (12 stages of tile 32x40x128, weight first, one chain, wgmma)"),
        ("shared_matmul_64x80x64x12_x_first_kernel_cutlass_kernel_spmd_rlkernelslinear_"
         "cuteProduct_object_at__CopyAtom",
         "CuTe shared_matmul (12 stages of tile 64x80x64, x first, one chain, wgmma)"),
    ],
)  # fmt: skip
def test_our_products_names_tell_tile_and_chain(name: str, said: str) -> None:
    assert str(identify(name)) == said


@pytest.mark.parametrize(
    ("name", "hopper", "instruction"),
    [
        ("nvjet_sm100_tst_128x64_64x9_2x1_v_bz_TNT", False, "tcgen05"),
        ("nvjet_tst_128x64_64x9_2x1_v_bz_TNT", False, ""),
        ("nvjet_sm90_tst_128x64_64x9_2x1_v_bz_TNT", False, "wgmma"),
        ("_matmul_64x16x256", False, ""),
        ("_matmul_32x128x64", False, "mma.sync"),
        ("_ring_matmul_16x32x512x4", False, ""),
        ("_ring_matmul_16x32x512x4", True, "wgmma"),
    ],
)
def test_an_instruction_is_only_told_where_it_is_known(
    name: str, hopper: bool, instruction: str
) -> None:
    assert identify(name, hopper).instruction == instruction


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
    ran = kernels_between_marks(events[::-1])
    assert set(ran) == {(0, Point(3, "down_proj")), (0, Point(4, "input_norm"))}
    assert ran[0, Point(3, "down_proj")][0].splits == "K split"
    assert ran[0, Point(4, "input_norm")] == (KernelInfo("Triton _forward"),)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ([], "one split"),
        (["_merge"], "ranges of keys in 1 launch, merged"),
        (["flash", "add", "flash"], "ranges of keys in 3 launches, merged"),
        (
            [
                "kernel_cutlass_kernel_flash_attncuteflash_fwd_combineFlashAttentionForwardCombine_object_at"
            ],
            "keys split",
        ),
    ],
)
def test_splits_of_keys_are_told_by_what_ran(after: list[str], said: str) -> None:
    flash = "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at"
    names = [flash, *(flash if name == "flash" else name for name in after)]
    launches = [
        event(n + 1, "cuda_driver", "cuLaunchKernelEx", correlation=n) for n in range(len(names))
    ]
    runs = [event(n + 50, "kernel", name, correlation=n) for n, name in enumerate(names)]
    (kernels,) = kernels_between_marks(
        [mark(0, "0||"), *launches, mark(20, "0|2|attention"), *runs]
    ).values()
    assert [kernel.splits for kernel in kernels if kernel.name == "FlashAttention-4"] == [said]


def test_without_a_gpu_the_outermost_ops_count() -> None:
    outer = event(1, "cpu_op", "aten::linear", **{"Input Dims": [[16, 64], [64, 64], []]}) | {
        "dur": 3
    }
    events = [
        mark(0, "1||"),
        outer,
        event(2, "cpu_op", "aten::mm"),
        event(5, "cpu_op", "aten::view"),
        mark(6, "1|0|o_proj"),
    ]
    assert kernels_between_marks(events) == {
        (1, Point(0, "o_proj")): (KernelInfo("aten::linear [16,64] × [64,64]"),)
    }


def test_a_function_of_ours_is_looked_into() -> None:
    events = [
        mark(0, "1||"),
        event(1, "cpu_op", "_RmsNorm", **{"Input Dims": [[16, 64]]}) | {"dur": 5},
        event(2, "cpu_op", "aten::square", **{"Input Dims": [[16, 64]]}) | {"dur": 2},
        event(3, "cpu_op", "aten::pow", **{"Input Dims": [[16, 64]]}),
        event(5, "cpu_op", "aten::mean", **{"Input Dims": [[16, 64]]}),
        mark(9, "1|0|input_norm"),
    ]
    (kernels,) = kernels_between_marks(events).values()
    assert [kernel.name for kernel in kernels] == ["aten::square [16,64]", "aten::mean [16,64]"]


def test_a_rows_kernels_are_those_of_its_own_pass(engine) -> None:
    rng = np.random.default_rng(0)
    sequence = ReplaySequence("0:0", rng.integers(2, 100, 50), rng.integers(2, 100, 10))
    kernels = kernels_of(engine(), ReplayCase((sequence,)))
    prompt, decoded = 20, 55
    assert kernels.forward_of[prompt] != kernels.forward_of[decoded]
    point = Point(1, "down_proj")
    assert "[48,192]" in str(kernels.at(point, prompt)[0])  # a chunk of 40, padded to the row tile
    assert "[16,192]" in str(kernels.at(point, decoded)[0])
    # both end at attention
    assert kernels.at(Point(1, "k"), decoded) == kernels.at(Point(1, "q"), decoded)

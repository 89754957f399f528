"""Attribution of a start's seconds to what its stacks say."""

from __future__ import annotations

from benchmarks.cold_start import by_category, tree

ENGINE = "spmd_rl/rollout/native/engine.py:_schedule_and_launch"
FLASH = "flash_attn/cute/interface.py:_flash_attn_fwd"
COMPILE = "cutlass/base_dsl/compiler.py:compile"
BITS = "spmd_rl/kernels/linear/cublas.py:has_reference_bits"
TRITON = "triton/compiler/compiler.py:compile"


def test_the_innermost_frame_that_is_known_decides() -> None:
    found = [
        ([ENGINE, FLASH, COMPILE, "linecache.py:checkcache"], 2.0),
        ([ENGINE, COMPILE], 0.5),
        ([ENGINE, BITS], 1.0),
        ([ENGINE, BITS, TRITON], 0.25),
        ([ENGINE], 3.0),
        (["threading.py:wait"], 0.125),
    ]
    assert by_category(found) == {
        "engine: other": 3.0,
        "CuTe: compile (FlashAttention-4)": 2.0,
        "cuBLAS: compare bits": 1.0,
        "CuTe: compile": 0.5,
        "Triton: compile": 0.25,
        "other": 0.125,
    }


def test_a_tree_leaves_out_short_frames_and_those_that_only_call_one() -> None:
    found = [(["main", "run", "a"], 2.0), (["main", "run", "b"], 1.0), (["main", "exit"], 0.1)]
    assert [line.split() for line in tree(found)] == [
        ["3.00", "run"],
        ["2.00", "a"],
        ["1.00", "b"],
    ]

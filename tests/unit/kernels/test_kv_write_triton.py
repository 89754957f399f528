"""Kernels that write keys and values as codes, in Triton's interpreter and compiled for Hopper.

As in `test_kv_codes_triton`, the interpreter is given numbers that codes stand for, and numbers
beyond them. So positions are 0, where a rotation leaves heads as they are.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spmd_rl.kernels.low_precision.kv_codes import KvCoding
from spmd_rl.kernels.rowwise.kv_write import KvSlots, write_kv
from spmd_rl.kernels.rowwise.rope import qk_norm_rope_into
from spmd_rl.kernels.rowwise.rope_inputs import QkNorm, Rotary

pytest.importorskip("triton")

from spmd_rl.kernels.rowwise import kv_write_triton, rope_triton
from tests.unit.kernels import kv_write_calls
from tests.unit.kernels.compiled import instructions, ptx_of
from tests.unit.kernels.interpreted import Calls, results
from tests.unit.kernels.test_kv_codes_triton import numbers

CALLS = "tests.unit.kernels.kv_write_calls"
EXPONENTS = (1, -2)
SLOTS = torch.tensor([5, -1, 0, 11, -1, 3])
NUM_TOKENS = len(SLOTS) + 2  # the last ones are padding
PAGES = 3, 4  # pages, and tokens of a page
SHAPES = [(2, 16), (3, 24), (9, 128)]  # heads, size


def new_rows(heads: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [
        numbers(NUM_TOKENS, heads, size, exponent=exponent, dtype=dtype) for exponent in EXPONENTS
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_and_counts_are_those_of_the_cpu(dtype: torch.dtype, tmp_path: Path) -> None:
    given = [(*new_rows(*shape, dtype), SLOTS, (*PAGES, *shape), EXPONENTS) for shape in SHAPES]
    found = results(Calls(CALLS, "written", {}, given), tmp_path)
    for (k, v, slots, shape, exponents), written in zip(given, found, strict=True):
        keys, values = torch.zeros(2, *shape, dtype=torch.uint8)
        coding = KvCoding(exponents, torch.zeros(2, dtype=torch.int64))
        write_kv(keys, values, slots, k, v, coding)
        for one, wanted in zip(written, (keys, values, coding.counts), strict=True):
            assert torch.equal(one, wanted)
        assert coding.counts.tolist() == [2 * 4 * shape[2] * shape[3], 4]
        assert keys.count_nonzero() and values.count_nonzero()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_keys_go_there_too(dtype: torch.dtype, tmp_path: Path) -> None:
    given = []
    for heads, size in SHAPES:
        q = torch.randn(NUM_TOKENS, 2 * heads, size).to(dtype)
        rotary = torch.zeros(NUM_TOKENS).long(), torch.ones(1, size // 2), torch.zeros(1, size // 2)
        rows = new_rows(heads, size, dtype)
        given.append((q, *rows, rotary, SLOTS, (*PAGES, heads, size), EXPONENTS))
    found = results(Calls(CALLS, "rotated", {}, given), tmp_path)
    for (q, k, v, at, slots, shape, exponents), written in zip(given, found, strict=True):
        keys, values = torch.zeros(2, *shape, dtype=torch.uint8)
        coding = KvCoding(exponents, torch.zeros(2, dtype=torch.int64))
        norm, into = QkNorm(None, None, 1e-6), KvSlots(keys, values, slots)
        turned = qk_norm_rope_into(q, k, v, norm, Rotary(*at), into, coding)
        for one, wanted in zip(written, (turned, keys, values, coding.counts), strict=True):
            assert torch.equal(one, wanted)
        assert coding.counts[1] == 4 and keys.count_nonzero()


def test_one_instruction_rounds_what_is_stored() -> None:
    k, v = torch.zeros(2, 8, 2, 128, dtype=torch.bfloat16)
    slots, pages = torch.zeros(8).long(), (2, 128, 2, 128)
    rotary = torch.zeros(8).long(), torch.ones(1, 64), torch.zeros(1, 64)
    for kernel, launch in (
        (kv_write_triton._write, lambda: kv_write_calls.written(k, v, slots, pages, (1, 0))),
        (
            rope_triton._forward,
            lambda: kv_write_calls.rotated(k, k, v, rotary, slots, pages, (1, 0)),
        ),
    ):
        assert instructions(ptx_of(kernel, launch))["cvt.rn.satfinite.e4m3x2.f32"] > 0

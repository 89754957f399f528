"""Kernels of attention in windows, in Triton's interpreter and compiled for Hopper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from spmd_rl.kernels.attention.token_attention import Reach
from spmd_rl.kernels.windows import attend_triton, gradients_triton
from spmd_rl.kernels.windows.sinks import gradient_of_sinks, with_sinks
from tests.unit.kernels.compiled import SHARED_BYTES, compiled_of, spilled_bytes
from tests.unit.kernels.interpreted import Calls, results
from tests.unit.kernels.latents.latent_case import Chunks, chunks_of, tokens_of
from tests.unit.kernels.paged_case import Data, Heads, qkv
from tests.unit.kernels.test_reach import oracle, reach_of
from tests.unit.kernels.windows import windows_calls

CALLS = "tests.unit.kernels.windows.windows_calls"
CASES = [(Heads(4, 2, 16), 30, True), (Heads(5, 1, 24), 100, True), (Heads(3, 3, 16), 1, False)]
LENGTHS = [1, 70, 200, 2]
PADDED = 288


def rows_of(heads: Heads, dtype: torch.dtype = torch.float32) -> Data:
    return qkv(PADDED, heads, dtype=dtype, device=torch.device("cpu"))


def close(x: Tensor, expected: Tensor) -> bool:
    return bool((x - expected).norm() <= 2e-6 * expected.norm())


def test_the_output_is_that_of_float64(tmp_path: Path) -> None:
    calls = [
        (*rows_of(heads), reach_of(heads, window, has_sinks).sinks, LENGTHS, window)
        for heads, window, has_sinks in CASES
    ]
    found = results(Calls(CALLS, "packed", {}, calls), tmp_path)
    for (heads, _, _), (*rows, sinks, _, window), out in zip(CASES, calls, found, strict=True):
        own = [one[: sum(LENGTHS)].double() for one in rows]
        expected = oracle((own[0], own[1], own[2]), LENGTHS, heads, Reach(window, sinks))
        assert close(out[: sum(LENGTHS)], expected)


def test_gradients_are_those_of_float64(tmp_path: Path) -> None:
    calls = []
    for heads, window, _ in CASES:
        grad = torch.randn(PADDED, heads.query, heads.dim)
        grad[sum(LENGTHS) :] = 0
        sinks = reach_of(heads, window, True).sinks
        calls.append((*rows_of(heads), sinks, grad, LENGTHS, window))
    found = results(Calls(CALLS, "gradients", {}, calls), tmp_path)
    for (heads, _, _), given, ours in zip(CASES, calls, found, strict=True):
        *rows, sinks, grad, _, window = given
        own = slice(sum(LENGTHS))
        leaves = [one.double().requires_grad_() for one in (*(one[own] for one in rows), sinks)]
        q, k, v, of_heads = leaves
        out = oracle((q, k, v), LENGTHS, heads, Reach(window, of_heads))
        theirs = torch.autograd.grad(out, leaves, grad[own].double())
        for one, other in zip(ours, theirs, strict=True):
            assert close(one[: len(other)], other) and not one[len(other) :].any()


def pages_of(page_size: int) -> Tensor:
    """Place pages at random, some free ones between. Shape: [B, P] int64."""
    counts = [-(-length // page_size) for length in LENGTHS]
    order = np.random.default_rng(1).permutation(sum(counts) + 3)
    table = np.full((len(LENGTHS), max(counts)), -1)
    for row, own in zip(table, np.split(order, np.cumsum(counts))[:-1], strict=True):
        row[: len(own)] = own
    return torch.from_numpy(table)


def slots_of(pages: Tensor, step: Chunks, size: int) -> Tensor:
    parts = []
    for one, start, length in zip(step.chosen, step.starts, step.lengths, strict=True):
        place = torch.arange(start, start + length)
        parts.append(pages[one, place // size] * size + place % size)
    return torch.cat(parts)


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_a_sequence_has_its_bits_in_packs_and_in_pages(page_size: int, tmp_path: Path) -> None:
    """Cut at any place, beside any others, and in pages where free slots hold large numbers."""
    for heads, window, has_sinks in CASES:
        q, k, v = rows_of(heads)
        sinks = reach_of(heads, window, has_sinks).sinks
        packed = Calls(CALLS, "packed", {}, [(q, k, v, sinks, LENGTHS, window)])
        (together,) = results(packed, tmp_path)
        pages = pages_of(page_size)
        shape = int(pages.max()) + 4, page_size, heads.key, heads.dim
        keys, values = torch.full((2, *shape), 1e30)
        steps, calls = list(chunks_of(LENGTHS, 0)), []
        for step in steps:
            tokens = tokens_of(LENGTHS, step)
            for cache, new in ((keys, k), (values, v)):
                cache.flatten(0, 1)[slots_of(pages, step, page_size)] = new[tokens]
            given = q[tokens], keys.clone(), values.clone(), sinks
            calls.append((*given, pages[step.chosen], step.starts, step.lengths, window))
        found = results(Calls(CALLS, "paged", {}, calls), tmp_path)
        for step, out in zip(steps, found, strict=True):
            assert torch.equal(out, together[tokens_of(LENGTHS, step)])


def test_sinks_after_a_kernel_are_those_within_one() -> None:
    heads, lengths = Heads(4, 2, 16), [70, 5]
    rows = [one.double() for one in qkv(75, heads, dtype=torch.float32, device=windows_calls.CPU)]
    sinks = reach_of(heads, 0, True).sinks
    assert sinks is not None
    leaf = sinks.double().requires_grad_()
    expected = oracle((rows[0], rows[1], rows[2]), lengths, heads, Reach(0, leaf))
    pull = torch.randn(expected.shape).double()
    expected.backward(pull)
    plain = oracle((rows[0], rows[1], rows[2]), lengths, heads, Reach())
    groups = rows[0].unflatten(1, (2, 2)).split(lengths)
    sums = []
    for q, k in zip(groups, rows[1].split(lengths), strict=True):
        scores = torch.einsum("tkgd,skd->tkgs", q, k) * heads.dim**-0.5
        unseen = torch.ones(len(k), len(k)).triu(1).bool()[:, None, None]
        sums.append(scores.masked_fill(unseen, -torch.inf).logsumexp(-1).flatten(1))
    out, log_sum = with_sinks(plain.float(), torch.cat(sums).float(), sinks)
    assert close(out, expected)
    inner = (pull * expected).sum(-1).float().detach()
    assert close(gradient_of_sinks(sinks, log_sum, inner), leaf.grad)


def test_kernels_fit_a_hopper_gpu() -> None:
    """With the sizes of gpt-oss, and few registers in memory."""
    heads = Heads(64, 8, 64)
    q, k, v = rows_of(heads, torch.bfloat16)
    sinks, grad = torch.zeros(64).bfloat16(), torch.zeros_like(q)

    def run() -> object:
        return windows_calls.gradients(q, k, v, sinks, grad, [*LENGTHS, 15], 128)

    with torch.enable_grad():
        compiled = [
            compiled_of(kernel, run)
            for kernel in (
                attend_triton._attend,
                gradients_triton._of_queries,
                gradients_triton._of_keys,
            )
        ]
    for one in compiled:
        assert one.metadata.shared <= SHARED_BYTES
        assert "wgmma.mma_async" in one.asm["ptx"] and spilled_bytes(one.asm["ptx"]) == 0

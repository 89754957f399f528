"""Kernels of attention to latents, in Triton's interpreter and compiled for Hopper."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import unproven
from spmd_rl.kernels.attention.backend import attention_backend
from spmd_rl.kernels.latents.sizes import LatentSizes
from spmd_rl.kernels.row_tiles.tiles import PAGE

pytest.importorskip("triton")

from spmd_rl.kernels.latents import attend_triton, gradients_triton, of_heads_triton
from tests.unit.kernels.compiled import SHARED_BYTES, compiled_of, spilled_bytes
from tests.unit.kernels.interpreted import Calls, results
from tests.unit.kernels.latents import latents_calls
from tests.unit.kernels.latents.latent_case import (
    chunks_of,
    oracle,
    pages_of,
    rows_of,
    slots_of,
    tokens_of,
)

CALLS = "tests.unit.kernels.latents.latents_calls"
CASES = [(4, LatentSizes(16, 16)), (5, LatentSizes(24, 8))]  # heads and sizes
LENGTHS = [1, 70, 131, 2]
PADDED = 208


def close(x: Tensor, expected: Tensor) -> bool:
    return bool((x - expected).norm() <= 1e-6 * expected.norm())


def test_the_output_is_that_of_float64(tmp_path: Path) -> None:
    given = [(*rows_of(PADDED, *case, torch.float32)[:2], LENGTHS, case[1]) for case in CASES]
    found = results(Calls(CALLS, "packed", {}, [(*one, tuple(s)) for *one, s in given]), tmp_path)
    for (q, keys, lengths, sizes), out in zip(given, found, strict=True):
        own = slice(sum(lengths))
        assert close(out[own], oracle(q[own].double(), keys[own].double(), lengths, sizes))
        assert out.isfinite().all(), "padding is one more sequence"


def test_gradients_are_those_of_float64(tmp_path: Path) -> None:
    given = [(*rows_of(PADDED, *case, torch.float32), LENGTHS, case[1]) for case in CASES]
    for _, _, grad, lengths, _ in given:
        grad[sum(lengths) :] = 0
    calls = [(*one, tuple(sizes)) for *one, sizes in given]
    found = results(Calls(CALLS, "gradients", {}, calls), tmp_path)
    for (q, keys, grad, lengths, sizes), (grad_q, grad_keys) in zip(given, found, strict=True):
        own = slice(sum(lengths))
        leaves = [one[own].double().requires_grad_() for one in (q, keys)]
        out = oracle(*leaves, lengths, sizes)
        expected = torch.autograd.grad(out, leaves, grad[own].double())
        assert close(grad_q[own], expected[0]) and close(grad_keys[own, 0], expected[1])
        assert not grad_q[sum(lengths) :].any() and not grad_keys[sum(lengths) :].any()


def test_a_sequence_has_its_bits_in_packs_and_in_pages(tmp_path: Path) -> None:
    """Cut at any place, beside any others, and in pages where free slots hold large numbers."""
    for heads, sizes in CASES:
        q, keys, _ = rows_of(PADDED, heads, sizes, torch.float32)
        (together,) = results(
            Calls(CALLS, "packed", {}, [(q, keys, LENGTHS, tuple(sizes))]), tmp_path
        )
        pages = pages_of(LENGTHS, 1)
        cache = torch.full((int(pages.max()) + 4, PAGE, sum(sizes)), 1e30)
        steps, calls = list(chunks_of(LENGTHS, 0)), []
        for step in steps:
            tokens = tokens_of(LENGTHS, step)
            cache.flatten(0, 1)[slots_of(pages, step)] = keys[tokens]
            given = q[tokens], cache.clone(), pages[step.chosen], step.starts, step.lengths
            calls.append((*given, sizes.latent))
        found = results(Calls(CALLS, "paged", {}, calls), tmp_path)
        for step, out in zip(steps, found, strict=True):
            assert torch.equal(out, together[tokens_of(LENGTHS, step)])


def test_keys_are_written_where_no_values_are(tmp_path: Path) -> None:
    keys, k = torch.zeros(3, PAGE, 1, 24), torch.randn(5, 1, 24)
    slots = torch.tensor([70, -1, 0, 191])
    (found,) = results(Calls(CALLS, "written", {}, [(keys, slots, k)]), tmp_path)
    keys.flatten(0, 1)[slots[[0, 2, 3]]] = k[[0, 2, 3]]
    assert torch.equal(found, keys)


def test_heads_are_multiplied_with_their_own_weights(tmp_path: Path) -> None:
    given = [
        (torch.randn(tokens, 3, inputs), torch.randn(3, outputs, inputs))
        for tokens, inputs, outputs in [(1, 64, 16), (70, 100, 72)]
    ]
    for (x, weights), found in zip(
        given, results(Calls(CALLS, "products", {}, given), tmp_path), strict=True
    ):
        expected = torch.einsum("thi,hoi->tho", x.double(), weights.double())
        assert close(found[0], expected) and torch.equal(found[0], found[1])


def test_kernels_fit_a_hopper_gpu() -> None:
    """With the sizes of published models, and few registers in memory."""
    sizes = LatentSizes(512, 64)
    q, keys, grad = rows_of(256, 16, sizes, torch.bfloat16)
    with torch.enable_grad():
        compiled = [
            compiled_of(
                kernel, lambda: latents_calls.gradients(q, keys, grad, [200, 56], tuple(sizes))
            )
            for kernel in (
                attend_triton._attend,
                gradients_triton._of_queries,
                gradients_triton._of_keys,
            )
        ]
    for one in compiled:
        assert one.metadata.shared <= SHARED_BYTES
        assert "wgmma.mma_async" in one.asm["ptx"] and "mma.sync" not in one.asm["ptx"]
        assert spilled_bytes(one.asm["ptx"]) < 400


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 512), (512, 128)])
def test_products_of_heads_fit_too(inputs: int, outputs: int) -> None:
    x, weights = torch.zeros(5, 16, inputs).bfloat16(), torch.zeros(16, outputs, inputs).bfloat16()
    compiled = compiled_of(
        of_heads_triton._multiply, lambda: of_heads_triton.products_of_heads(x, weights)
    )
    assert "wgmma.mma_async" in compiled.asm["ptx"] and spilled_bytes(compiled.asm["ptx"]) == 0


def test_facts_say_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = [(9, 0)]
    monkeypatch.setattr(unproven, "are_allowed", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    cuda = torch.device("cuda")
    facts = attention_backend(576, torch.bfloat16, cuda, latent_dim=512).facts()
    assert facts == {
        "attention": "latents in ascending blocks",
        "attention_tile": "64, 64, 8, 2",
    }
    capability[0] = (10, 0)
    facts = attention_backend(576, torch.bfloat16, cuda, latent_dim=512).facts()
    assert facts["attention"] == "latents in ascending blocks, not compared"

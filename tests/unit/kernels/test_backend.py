"""Choice of the attention backend, and what the network's one call does with either backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import KvCache, PagedAttention, QkNorm, Rotary, qk_norm_rope, rope_table
from spmd_rl.kernels.attention import backend, paged
from spmd_rl.kernels.attention.backend import attention_backend
from spmd_rl.kernels.attention.blocked_backend import BlockedAttention
from spmd_rl.kernels.attention.flash_backend import FlashAttention
from tests.laws.source import PACKAGE
from tests.specs import kv_layers

CPU = torch.device("cpu")
NUM_TOKENS, HEADS, KV_HEADS, DIM = 5, 4, 2, 8


def test_flash_attention_is_chosen_where_it_was_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(attention_backend(64, torch.bfloat16, CPU), BlockedAttention)
    monkeypatch.setattr(backend, "flash_supports", lambda *case: True)
    assert isinstance(attention_backend(64, torch.bfloat16, CPU, split=128), FlashAttention)


def test_nobody_else_asks_which_attention_runs() -> None:
    asking = {file.stem for file in PACKAGE.rglob("*.py") if "flash_supports" in file.read_text()}
    assert asking == {"backend", "flash"}


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("fuses", [False, True])
def test_keys_are_rotated_and_written_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, fuses: bool, with_gradients: bool
) -> None:
    """Both paths write the same keys; only the fused one writes them in the op that rotates."""
    if fuses:
        monkeypatch.setattr(paged, "attention_backend", lambda *case: FlashAttention(128, CPU))
    cache = KvCache(
        kv_layers(1, KV_HEADS, DIM), num_pages=2, page_size=4,
        dtype=torch.float32, device=CPU,
    )  # fmt: skip
    fused_writes = []
    fused = paged.qk_norm_rope_into
    monkeypatch.setattr(
        paged, "qk_norm_rope_into", lambda *inputs: fused_writes.append(1) or fused(*inputs)
    )
    q, k, v = (torch.randn(NUM_TOKENS, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    norm = QkNorm(torch.ones(DIM), torch.full((DIM,), 0.5), 1e-6)
    table = rope_table(torch.tensor([1.0, 0.3, 0.1, 0.01]), 9)
    rotary = Rotary(torch.from_numpy(np.arange(NUM_TOKENS)), *table)
    slots = torch.tensor([6, 1, 2, 3, 0])
    read: list[tuple[Tensor, Tensor, Tensor]] = []
    attend = PagedAttention(cache, slots, lambda *inputs: read.append(inputs) or inputs[0])
    with torch.set_grad_enabled(with_gradients):
        attend.rotate_and_attend(0, q, k, v, norm, rotary)
    (queries, keys, values), expected = read[0], qk_norm_rope(q, k, norm, rotary)
    by_slot = (x.flatten(0, 1) if fuses else x.transpose(0, 1) for x in (keys, values))
    written = [x[slots] for x in by_slot]
    for found, right in zip((queries, *written), (*expected, v), strict=True):
        assert torch.equal(found, right)
    assert bool(fused_writes) == (fuses and not with_gradients)

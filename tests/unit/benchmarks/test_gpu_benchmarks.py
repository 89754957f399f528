"""What the GPU benchmarks compute on the host: shapes, the rollout's lengths, swapped operations."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from benchmarks import paths, record, rollout_vs_sglang
from benchmarks.fsdp_overlap import overlap, union
from benchmarks.grpo_proof import USED
from benchmarks.shapes import write_config
from spmd_rl.kernels import token_logprobs
from spmd_rl.model import network
from spmd_rl.rollout.native.plan import Counters


@pytest.mark.parametrize(("name", "billions"), [("0.6B", 0.596), ("4B", 4.022), ("8B", 8.191)])
def test_shapes_are_those_of_qwen3(tmp_path: Path, name: str, billions: float) -> None:
    spec = write_config(name, tmp_path / name)
    assert spec.num_parameters / 1e9 == pytest.approx(billions, abs=1e-3)


def test_a_rollout_has_the_same_long_tail_every_time() -> None:
    lengths = rollout_vs_sglang.new_tokens()
    assert lengths == rollout_vs_sglang.new_tokens()
    assert (len(lengths), min(lengths), max(lengths)) == (512 * 8, 64, 2048)
    assert sorted(lengths)[len(lengths) // 2] == pytest.approx(rollout_vs_sglang.MEDIAN, rel=0.1)


def test_what_the_proof_used_is_counted() -> None:
    assert set(USED.values()) - {field.name for field in fields(Counters)} == {"num_graphs"}


def test_paths_swap_operations_and_put_them_back() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    ours = network.rms_norm
    with paths.PATHS["torch"]():
        assert network.rms_norm is paths.torch_norm
        assert torch.allclose(network.rms_norm(x, weight, 1e-6), ours(x, weight, 1e-6), atol=1e-5)
    assert network.rms_norm is ours


def test_torch_operations_compute_what_ours_do() -> None:
    torch.manual_seed(0)
    q, k, weight = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(8)
    angles = torch.randn(16, 4)
    rotary = torch.tensor([3, 0, 7, 7, 15]), angles.cos(), angles.sin()
    for ours, theirs in (
        (network.qk_norm_rope(q, k, weight, weight, 1e-6, *rotary), paths.torch_norm_rope),
        (network.add_rms_norm(q, q, weight, 1e-6), paths.torch_add_norm),
    ):
        given = (q, k, weight, weight, 1e-6, *rotary) if theirs is paths.torch_norm_rope else (q, q, weight, 1e-6)
        for one, other in zip(ours, theirs(*given), strict=True):
            assert torch.allclose(one, other, atol=1e-5)
    logits, targets, scale = torch.randn(6, 50), torch.randint(50, (6,)), torch.rand(6) + 0.5
    for one, other in zip(
        token_logprobs(logits, targets, scale),
        paths.torch_logprobs(logits, targets, scale),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_bar_may_be_a_least_ratio() -> None:
    rows = [
        record.compared("rollout", value, "tokens/s", peer="SGLang", peer_value=10, at_least=1.2) for value in (12, 11)
    ]
    assert [(row.bar, row.holds) for row in rows] == [(">= 1.2x", True), (">= 1.2x", False)]


def test_time_that_two_streams_share() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert overlap([(0, 10)], [(2, 3), (5, 20)]) == 6
    assert overlap([(0, 1), (2, 3)], [(1, 2), (4, 5)]) == 0
    spans = [(float(i), i + 1.5) for i in range(0, 20, 2)]
    ticks = [0.25 + 0.5 * i for i in range(44)]
    shifted = [(start + 0.5, end + 1) for start, end in spans]
    both = sum(any(a <= t < b for a, b in spans) and any(a <= t < b for a, b in shifted) for t in ticks)
    assert overlap(spans, shifted) == both / 2

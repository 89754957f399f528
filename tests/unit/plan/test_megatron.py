"""Plans of runs with a trainer of Megatron-core, against sizes worked out by hand."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.config.load import load
from spmd_rl.plan.resolve import RunPlan, resolve
from spmd_rl.plan.text import lines
from spmd_rl.recipes import grpo, sft
from tests.unit.plan.test_plan import PARAMETERS, QWEN3_8B

QWEN3_30B_A3B = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
OUTER = 2 * 151936 * 4096 + 4096  # embedding, head and last norm of the dense model
EXPERTS = 48 * 128 * 3 * 2048 * 768
OTHERS = 30_532_122_624 - EXPERTS
MEGATRON = ("trainer.backend.kind=megatron", "trainer.dtype=bfloat16")
SP = "trainer.backend.sequence_parallel=true"


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    """Plan a run of one of the two models: `plan(config, world_size, *words)`."""

    def planned(config: dict[str, Any], world_size: int, *words: str) -> RunPlan:
        (tmp_path / "config.json").write_text(json.dumps(config))
        # the native engine does not generate with a mixture of experts
        recipe = sft.Config if "num_experts" in config else grpo.Config
        given = [f"model={tmp_path}", "data=none.jsonl", *MEGATRON, *words]
        return resolve(load(recipe, None, given), world_size)

    return planned


def sizes(plan: RunPlan) -> dict[str, int]:
    return {entry.tag: entry.num_bytes for entry in plan.ledgers[0].entries}


def split(**axes: int) -> tuple[str, ...]:
    return tuple(f"split.train.{axis}={size}" for axis, size in axes.items())


@pytest.mark.parametrize(
    ("num_ranks", "axes", "copies"),
    [(1, {}, 1), (4, {"tp": 2, "pp": 2}, 1), (8, {"tp": 2, "pp": 2}, 2), (4, {"cp": 4}, 4)],
)
def test_a_dense_model_is_cut_and_its_state_sharded(
    plan: Any, num_ranks: int, axes: dict[str, int], copies: int
) -> None:
    """Each stage counts as having embedding and head, and has its share of the layers."""
    found = sizes(plan(QWEN3_8B, num_ranks, *split(**axes)))
    tp, pp = axes.get("tp", 1), axes.get("pp", 1)
    own = (PARAMETERS - OUTER) // (tp * pp) + OUTER // tp
    assert found["moments"] == pytest.approx(8 * own / copies, rel=1e-6)
    assert found["master"] == pytest.approx((2 + 4) * own + 4 * own / copies, rel=1e-6)


def test_without_the_distributed_optimizer_every_rank_has_all_state(plan: Any) -> None:
    whole = sizes(plan(QWEN3_8B, 4, "trainer.backend.distributed_optimizer=false"))
    assert whole["moments"] == 8 * PARAMETERS
    assert whole["moments"] == 4 * sizes(plan(QWEN3_8B, 4))["moments"]


def test_float32_weights_are_their_own_masters(plan: Any) -> None:
    assert sizes(plan(QWEN3_8B, 4, "trainer.dtype=float32"))["master"] == 8 * PARAMETERS


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_activations_fall_with_each_cut_of_the_tokens_or_matrices(plan: Any, axis: str) -> None:
    words = ("trainer.logit_rows=128",)
    found = [sizes(plan(QWEN3_8B, 8, *words, *split(**{axis: size}))) for size in (1, 2, 4)]
    for more, less in pairwise(one["activations"] for one in found):
        assert 0.4 * more < less < 0.95 * more


def test_recomputation_saves_activations(plan: Any) -> None:
    full = "trainer.backend.model_options.recompute_granularity=full"
    plain, less = (sizes(plan(QWEN3_8B, 1, *words)) for words in ((), (full,)))
    assert less["activations"] < 0.5 * plain["activations"]


@pytest.mark.parametrize(
    ("num_ranks", "axes", "copies", "expert_copies"),
    [
        (8, {"ep": 8}, 8, 1),
        (16, {"ep": 8}, 16, 2),
        (16, {"tp": 2, "pp": 2, "ep": 8}, 4, 1),
        (32, {"tp": 2, "pp": 2, "ep": 4}, 8, 4),
        (32, {"tp": 2, "pp": 2, "ep": 4, "etp": 2}, 8, 2),
    ],
)
def test_experts_are_sharded_over_their_own_copies(
    plan: Any, num_ranks: int, axes: dict[str, int], copies: int, expert_copies: int
) -> None:
    """Other ranks hold copies of an expert than of the rest of a layer."""
    tp, pp, ep = axes.get("tp", 1), axes.get("pp", 1), axes["ep"] * axes.get("etp", 1)
    words = (SP,) if tp > 1 else ()
    found = sizes(plan(QWEN3_30B_A3B, num_ranks, *split(**axes), *words))
    outer = 2 * 151936 * 2048 + 2048
    others, experts = (OTHERS - outer) / (tp * pp) + outer / tp, EXPERTS / (pp * ep)
    shard = others / copies + experts / expert_copies
    assert found["moments"] == pytest.approx(8 * shard, rel=1e-6)
    assert found["master"] == pytest.approx(6 * (others + experts) + 4 * shard, rel=1e-6)


def test_tokens_of_a_mixture_go_through_some_experts(plan: Any) -> None:
    """Four experts of twice the size compute as much as eight, with half the copies of tokens."""
    words = split(ep=8)
    eight = sizes(plan(QWEN3_30B_A3B, 8, *words))["activations"]
    wide = QWEN3_30B_A3B | {"num_experts_per_tok": 4, "moe_intermediate_size": 1536}
    four = sizes(plan(wide, 8, *words))["activations"]
    assert eight - four == 2 * 48 * 16384 * 4 * 2048 * 2


@pytest.mark.parametrize(
    ("config", "axes"),
    [(QWEN3_8B, {"tp": 2, "pp": 2}), (QWEN3_30B_A3B, {"tp": 2, "pp": 2, "ep": 8})],
    ids=["dense", "mixture"],
)
def test_the_text_has_its_own_axes_and_no_lines_of_fsdp2(
    plan: Any, config: dict[str, Any], axes: dict[str, int]
) -> None:
    found = plan(config, 16, *split(**axes), SP)
    said = "\n".join(lines(found))
    assert "pp 2 x dp 1 x fsdp 4 x tp 2" in said
    assert {name for name, _ in found.groups} >= {f"train.{axis}" for axis in axes}
    for tag in ("master", "moments", "activations"):
        assert f"\n  {tag} " in said
    for of_fsdp2 in ("gathered", "grads", "trainer.backend.recompute", "unit", "copies of"):
        assert f"\n  {of_fsdp2}" not in said
        assert f"\n{of_fsdp2}" not in said


def test_a_push_brings_each_engine_the_model_once(plan: Any) -> None:
    found = plan(
        QWEN3_8B,
        12,
        *split(tp=2, pp=2),
        "split.train.ranks=8",
        "split.infer.ranks=4",
        "engine.dtype=bfloat16",
    )
    assert found.push.copy_bytes == 2 * PARAMETERS
    assert {found.push.num_receives(rank) for rank in range(8, 12)} == {8}
    assert {found.push.num_sends(rank) for rank in range(8)} == {4}


def test_moments_in_host_memory_leave_the_gpu(plan: Any) -> None:
    found = plan(QWEN3_8B, 1, "trainer.backend.offload=moments").ledgers[0]
    on_gpu = {entry.tag: entry.num_bytes for entry in found.entries}
    assert on_gpu["moments"] == 0
    assert found.host_bytes() >= 8 * PARAMETERS
    assert 0 < on_gpu["chunks"] < 1 << 30

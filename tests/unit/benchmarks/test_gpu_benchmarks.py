"""Host side of benchmarks: shapes, the rollout's lengths, swapped operations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import record, rollout_vs_sglang, train_step
from benchmarks.grpo_proof import broken_promises
from benchmarks.kernels import decode_gemm
from benchmarks.laptop_vs_trl import _check_equal
from benchmarks.shapes import QWEN3, write_config
from spmd_rl.controller.contracts import CONTRACT_FILE, by_digest
from spmd_rl.kernels.linear import dispatch


@pytest.mark.parametrize(("name", "billions"), [("0.6B", 0.596), ("4B", 4.022), ("8B", 8.191)])
def test_shapes_are_those_of_qwen3(tmp_path: Path, name: str, billions: float) -> None:
    spec = write_config(name, tmp_path / name)
    assert spec.num_parameters / 1e9 == pytest.approx(billions, abs=1e-3)


def test_a_rollout_has_the_same_long_tail_every_time() -> None:
    lengths = rollout_vs_sglang.new_tokens()
    assert lengths == rollout_vs_sglang.new_tokens()
    assert (len(lengths), min(lengths), max(lengths)) == (512 * 8, 64, 2048)
    assert sorted(lengths)[len(lengths) // 2] == pytest.approx(rollout_vs_sglang.MEDIAN, rel=0.1)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, []),
        (
            {"linear": "library, no promise"},
            ["follow different numeric contracts: linear", "'library, no promise'"],
        ),
        (
            {"dtype": "torch.float32"},
            ["follow different numeric contracts: dtype", "rollout computes in torch.float32"],
        ),
    ],
)
def test_a_proof_without_a_promise_is_seen(
    tmp_path: Path, other: dict[str, str], said: list[str]
) -> None:
    facts = {"dtype": "torch.bfloat16", "linear": "one ascending chain"}
    kept = by_digest({"trainer": facts, "rollout": facts | other})
    (tmp_path / CONTRACT_FILE).write_text(json.dumps({"trainer->rollout": kept}))
    broken = broken_promises(tmp_path)
    assert len(broken) == len(said)
    assert all(
        clause.startswith("trainer->rollout: ") and part in clause
        for clause, part in zip(broken, said, strict=True)
    )


def test_a_proof_without_a_link_is_seen(tmp_path: Path) -> None:
    kept = by_digest({"trainer on rank 0": {"dtype": "torch.bfloat16"}})
    (tmp_path / CONTRACT_FILE).write_text(json.dumps({"trainer": kept}))
    assert broken_promises(tmp_path) == ["no link kept what its ends follow"]


def test_a_step_free_of_the_contract_multiplies_in_another_way() -> None:
    ours = dispatch.matmul
    with train_step.VARIANTS["free"]():
        assert dispatch.matmul is train_step.free_product
    assert dispatch.matmul is ours
    x, weight, bias = torch.randn(4, 8), torch.randn(16, 8), torch.randn(16)
    for added in None, bias:
        found = train_step.free_product(x, weight, added, torch.float32)
        assert torch.allclose(found, torch.nn.functional.linear(x, weight, added), atol=1e-5)


@pytest.mark.parametrize("name", QWEN3)
def test_products_are_those_of_the_network(tmp_path: Path, name: str) -> None:
    spec = write_config(name, tmp_path)
    weights = dict(spec.parameter_shapes())

    def shape(*ends: str) -> tuple[int, int]:
        found = [weights[f"model.layers.0.{end}_proj.weight"] for end in ends]
        return sum(rows for rows, _ in found), found[0][1]

    qkv, swiglu = [f"self_attn.{one}" for one in "qkv"], ["mlp.gate", "mlp.up"]
    products = decode_gemm.shapes()
    assert {
        key.split()[1]: value[:2]
        for key, value in products.items()
        if key.startswith(f"Qwen3-{name} ")
    } == {
        "q": shape(qkv[0]),
        "kv": shape(qkv[1]),
        "qkv": shape(*qkv),
        "o": shape("self_attn.o"),
        "gate": shape(swiglu[0]),
        "gate_up": shape(*swiglu),
        "down": shape("mlp.down"),
        "lm_head": weights["model.embed_tokens.weight"],
    }
    assert [decode_gemm.pack_rows(f"Qwen3-{name} {one}") for one in ("q", "lm_head")] == [
        16384,
        2048,
    ]


def test_products_of_decoding_are_counted() -> None:
    def product(what: str, value: float, itself: float = 1.0) -> list[record.Row]:
        return [
            record.measured(f"{what}, {decode_gemm.ITSELF}", itself, ""),
            record.compared(
                what, value, "us", peer="cuBLAS's best", peer_value=1, at_most=decode_gemm.BAR
            ),
            record.measured(
                f"{what}, {decode_gemm.FLOOR}", 1 / value, "", at_least=decode_gemm.FLOOR_BAR
            ),
            record.measured(f"{what}, {decode_gemm.WEIGHT_FLOOR}", 0.9 / value, ""),
        ]

    rows = decode_gemm.summary(
        [*product("a", 1.0), *product("b", 1.01), *product("c", 1.2, itself=1.015)]
    )
    assert [(row.value, row.unit, row.holds) for row in rows] == [
        (1.0, "", None),
        (1.015, "", None),
        (2, "of 3", False),
        (2, "of 3", False),
        (1, "of 3", None),
        (2, "of 3", False),
        (2, "of 3", None),
    ]


def test_unequal_work_is_refused() -> None:
    ours = {"generated_tokens": 8, "gradient_tokens": 8, "prompt_tokens": 6, "grad_norm": 1.0}
    _check_equal(ours, ours | {"grad_norm": 1.0005})
    for change in ({"gradient_tokens": 7}, {"grad_norm": 1.01}):
        with pytest.raises(SystemExit, match="unequal work"):
            _check_equal(ours, ours | change)

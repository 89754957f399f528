"""Host side of the GPU benchmarks: shapes, the rollout's lengths, swapped operations."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import engine_cost, engines, proof_cost, record, rollout_vs_sglang, train_variants
from benchmarks.cublas import every_way
from benchmarks.fsdp_overlap import overlap, union
from benchmarks.grpo_proof import USED, broken_promises
from benchmarks.kernels import decode_gemm, filters, layer_cases
from benchmarks.shapes import QWEN3, write_config
from spmd_rl.controller.contracts import CONTRACT_FILE, by_digest
from spmd_rl.kernels import QkNorm, Rotary, token_logprobs, write_kv
from spmd_rl.kernels.attention import token_attention
from spmd_rl.kernels.linear import dispatch, swiglu
from spmd_rl.kernels.linear.cublaslt import Gemm, Shape
from spmd_rl.model.layers import norm_module
from spmd_rl.rollout.native import build
from spmd_rl.rollout.native.counters import SchedulerCounters
from spmd_rl.train import on_policy
from spmd_rl.train.metric_sums import MetricSums


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
    assert set(USED.values()) - {field.name for field in fields(SchedulerCounters)} == {
        "num_graphs"
    }


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


def test_paths_swap_operations_and_put_them_back() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    ours = norm_module.rms_norm
    with train_variants.VARIANTS["torch"]():
        assert norm_module.rms_norm is train_variants.torch_norm
        theirs = norm_module.rms_norm(x, weight, 1e-6)
        assert torch.allclose(theirs, ours(x, weight, 1e-6), atol=1e-5)
    assert norm_module.rms_norm is ours


def test_engines_free_of_the_contract_multiply_in_other_ways() -> None:
    used = {}
    for path, context in engine_cost.PATHS.items():
        with context():
            used[path] = dispatch.matmul, swiglu.choose_gated_tile(64, 9728) is not None
    ours, free, apart = used.values()
    assert ours == (dispatch.matmul, True)
    assert free[0] is apart[0] is not ours[0]
    assert (free[1], apart[1]) == (True, False)


def test_engines_are_built_as_the_code_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[object, ...]] = []
    monkeypatch.setattr(build, "build", lambda *given: built.append(given))
    engines.Ours(str(tmp_path))
    cfg, folder, device, _ = built[0]
    assert (cfg.max_batch, folder, device.type) == (engines.MAX_BATCH, str(tmp_path), "cuda")

    class Engine:
        def __init__(self, *given: object) -> None:
            self.given = given

        def sink(self) -> SimpleNamespace:
            return SimpleNamespace(commit=lambda version: None)

    monkeypatch.setattr(engine_cost, "load_model", lambda *given: given)
    monkeypatch.setattr(engine_cost, "NativeEngine", Engine)
    model, cfg, device = engine_cost.engine(tmp_path).given
    assert (model[0], cfg.num_pages) == (tmp_path, engine_cost.NUM_PAGES)


def test_a_shape_is_raced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raced = []

    def first(ways: list[Gemm], shape: Shape) -> Gemm:
        raced.append(shape)
        return ways[0]

    monkeypatch.setattr(train_variants, "fastest", first)
    weight, bias = torch.randn(16, 8), torch.randn(16)
    product = train_variants.Race(every_way)
    for rows, added in (4, None), (4, None), (4, bias), (8, None):
        x = torch.randn(rows, 8)
        found = product(x, weight, added, torch.float32)
        assert torch.allclose(found, torch.nn.functional.linear(x, weight, added), atol=1e-5)
    assert [(shape.n, shape.k, shape.rows, shape.has_bias) for shape in raced] == [
        (16, 8, 4, False),
        (16, 8, 4, True),
        (16, 8, 8, False),
    ]


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


def test_torch_draws_from_the_nucleus_and_scores_among_all() -> None:
    logits = torch.full((2, 50), -1.0).index_fill_(1, torch.tensor([7]), 8.0)
    wanted = torch.tensor([3, 3]), torch.tensor([0.9, 0.9]), torch.tensor([0.1, 0.1])
    drawn, logprob = filters.by_sort(logits, *wanted)
    assert drawn.tolist() == [7, 7]
    assert torch.allclose(logprob.squeeze(1), logits.log_softmax(-1)[:, 7])


def test_torch_writes_where_ours_do() -> None:
    pages = [torch.zeros(2, 4, 3, 8) for _ in range(4)]
    slots, k, v = torch.tensor([5, 0, 7]), torch.randn(3, 3, 8), torch.randn(3, 3, 8)
    layer_cases.torch_write(*pages[:2], slots, k, v)
    write_kv(*pages[2:], slots, k, v)
    assert torch.equal(pages[0], pages[2]) and torch.equal(pages[1], pages[3])


def test_torch_operations_compute_what_ours_do() -> None:
    torch.manual_seed(0)
    q, k, weight = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(8)
    angles = torch.randn(16, 4)
    rotary = Rotary(torch.tensor([3, 0, 7, 7, 15]), angles.cos(), angles.sin())
    norm = QkNorm(weight, weight, 1e-6)
    for ours, theirs in (
        (token_attention.qk_norm_rope(q, k, norm, rotary), train_variants.torch_norm_rope),
        (norm_module.add_rms_norm(q, q, weight, 1e-6), train_variants.torch_add_norm),
    ):
        given = (
            (q, k, norm, rotary)
            if theirs is train_variants.torch_norm_rope
            else (q, q, weight, 1e-6)
        )
        for one, other in zip(ours, theirs(*given), strict=True):
            assert torch.allclose(one, other, atol=1e-5)
    logits, targets, scale = torch.randn(6, 50), torch.randint(50, (6,)), torch.rand(6) + 0.5
    for one, other in zip(
        token_logprobs(logits, targets, scale),
        train_variants.torch_logprobs(logits, targets, scale),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_bar_may_be_a_least_ratio() -> None:
    rows = [
        record.compared("rollout", value, "tokens/s", peer="SGLang", peer_value=10, at_least=1.2)
        for value in (12, 11)
    ]
    assert [(row.bar, row.holds) for row in rows] == [(">= 1.2x", True), (">= 1.2x", False)]


def test_time_that_two_streams_share() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert overlap([(0, 10)], [(2, 3), (5, 20)]) == 6
    assert overlap([(0, 1), (2, 3)], [(1, 2), (4, 5)]) == 0
    spans = [(float(i), i + 1.5) for i in range(0, 20, 2)]
    ticks = [0.25 + 0.5 * i for i in range(44)]
    shifted = [(start + 0.5, end + 1) for start, end in spans]
    both = sum(
        any(a <= t < b for a, b in spans) and any(a <= t < b for a, b in shifted) for t in ticks
    )
    assert overlap(spans, shifted) == both / 2


def test_a_step_without_the_comparison_has_the_same_sums() -> None:
    lp = torch.zeros(3)
    micro = SimpleNamespace(
        versions=torch.tensor([1, 1, -1]), rollout_logprobs=torch.tensor([0.0, 1.0, 0.0])
    )
    compared, left_out, leave_out = MetricSums(), MetricSums(), proof_cost.LeftOut()
    for _ in range(2):
        on_policy.compare_with_rollout(lp, micro, 1, compared)
        leave_out(lp, micro, 1, left_out)
    (names,) = compared._sums
    assert (compared._sums.keys(), compared._maxima.keys()) == (
        left_out._sums.keys(),
        left_out._maxima.keys(),
    )
    assert compared._sums[names][names.index(on_policy.MISMATCHED)] == 2
    assert not any(value.any() for value in (left_out._sums[names], *left_out._maxima.values()))

"""Engines that take several projections as one product, as on GPUs, beside a trainer that takes
them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from spmd_rl.microscope.diagnose.compare import compare
from spmd_rl.microscope.diagnose.explain import VariantMatch
from spmd_rl.microscope.diagnose.faults import InHalves, plant
from spmd_rl.microscope.examine import ReplaySetup, examine
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import TrainerPass
from spmd_rl.microscope.taps.points import OPS, Point
from spmd_rl.microscope.taps.taps import HashTap
from spmd_rl.model.fused_projections import FusedProjections

pytestmark = pytest.mark.usefixtures("no_kernels")
MIDDLE = 1  # of three layers
CHAIN, HALVES = "the contract's product", "K summed in 2 parts"
SILU = "float32 inside with one rounding, the contract's"


@pytest.fixture(scope="module")
def few(case: ReplayCase) -> ReplayCase:
    return ReplayCase(case.sequences[:2])


@pytest.fixture
def joined(engine: Callable[[], EnginePass]) -> EnginePass:
    path = engine()
    path.model.pack_projections()
    path.model.fuse_projections()
    return path


class Fused(FusedProjections):
    """As on a GPU: no product is to be seen."""

    def fuses(self, x: torch.Tensor) -> bool:
        return True


class Wrong(FusedProjections):
    """The last column of the product is wrong."""

    def product(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [one.clone() for one in super().product(x)]
        parts[-1][:, -1] += 1
        return parts


def test_the_columns_of_a_joined_product_are_the_trainers_projections(
    joined, trainer, case
) -> None:
    comparison = compare(joined, trainer, case)
    assert comparison.results == ()
    assert {point.op for point in comparison.points} == set(OPS) - {"router", "routes", "experts"}
    assert all(
        isinstance(layer.mlp.joined, FusedProjections) for layer in joined.model.model.layers
    )


def test_what_is_fused_has_no_point_and_the_rest_agrees(joined, trainer, case) -> None:
    for layer in joined.model.model.layers:
        layer.mlp.joined = Fused(**vars(layer.mlp.joined))
    comparison = compare(joined, trainer, case)
    assert comparison.results == ()
    assert {point.op for point in comparison.points} == set(OPS) - {
        "gate_proj",
        "up_proj",
        "router",
        "routes",
        "experts",
    }


def test_the_joined_products_are_put_back(joined, case) -> None:
    before = [(layer.self_attn.joined, layer.mlp.joined) for layer in joined.model.model.layers]
    joined.run(case, HashTap(case.num_rows))
    after = [(layer.self_attn.joined, layer.mlp.joined) for layer in joined.model.model.layers]
    assert all(
        x is y
        for one, other in zip(before, after, strict=True)
        for x, y in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("name", "op"), [("self_attn", "v_proj"), ("mlp", "up_proj")])
def test_a_wrong_column_is_found_in_the_projection_that_it_belongs_to(
    joined, trainer, few, name, op
) -> None:
    module = getattr(joined.model.model.layers[MIDDLE], name)
    module.joined = Wrong(**vars(module.joined))
    found = compare(joined, trainer, few)
    assert [one.point for one in found.results if one.status == "introduced"] == [Point(MIDDLE, op)]


PLANTED = {
    "split-k-qkv": (["q_proj", "k_proj", "v_proj"], HALVES, CHAIN),
    "split-k-gate-up": (["act"], f"{HALVES}, then {SILU}", SILU),
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_planted_fault_is_found_and_its_arithmetic_named(
    engine, trainer, few, folder, fault, side
) -> None:
    path = engine()
    plant(fault, path)
    sides = (path, trainer) if side == "left" else (trainer, path)
    found = examine(ReplaySetup(few, *sides, str(folder)))
    ops, wrong, right = PLANTED[fault]
    assert [one.point for one in found.comparison.results if one.status == "introduced"] == [
        Point(MIDDLE, op) for op in ops
    ]
    for cause in found.explanations.values():
        ours, theirs = (cause.left, cause.right) if side == "left" else (cause.right, cause.left)
        assert [match.description for match in ours.matches] == [wrong]
        assert [match.description for match in theirs.matches] == [right]


class FusedForFew(InHalves):
    """As on a GPU: what is many rows is two kernels."""

    def fuses(self, x: torch.Tensor) -> bool:
        return len(x) <= 16


@pytest.mark.parametrize("fed", ["engine", "trainer"])
def test_each_row_is_explained_from_what_its_step_showed(
    joined, trainer, case, folder, fed: str
) -> None:
    module = joined.model.model.layers[MIDDLE].mlp
    module.joined = FusedForFew(**vars(module.joined))
    apart = TrainerPass(trainer.model, max_tokens=64)
    apart.rows_are_distinct = fed == "trainer"
    some = ReplayCase(
        (*case.sequences[1:2], replace(case.sequences[2], response=case.sequences[2].response[:20]))
    )
    found = examine(ReplaySetup(some, joined, apart, str(folder)))
    assert found.comparison.patched == fed
    rows = {
        one.point.op: one.num_rows for one in found.comparison.results if one.status == "introduced"
    }
    fused = rows["act"] - rows["gate_proj"]
    assert set(rows) == {"gate_proj", "up_proj", "act"}
    assert fused > 0
    cause = found.explanations[Point(MIDDLE, "act")]
    assert cause.left.matches == (
        VariantMatch(SILU, rows["gate_proj"]),
        VariantMatch(f"{HALVES}, then {SILU}", fused, fused),
    )
    assert cause.right.matches == (VariantMatch(SILU, rows["act"], fused),)
    assert [
        match.description for match in found.explanations[Point(MIDDLE, "gate_proj")].left.matches
    ] == [HALVES]


def test_a_fault_outlives_the_engine_joining_its_projections_again(engine) -> None:
    path = engine()
    plant("split-k-qkv", path)
    path.model.pack_projections()
    path.model.fuse_projections()
    joined = [layer.self_attn.joined for layer in path.model.model.layers]
    assert [isinstance(one, InHalves) for one in joined] == [False, True, False]


@pytest.mark.parametrize(
    ("op", "says"), [("q", HALVES), ("v", HALVES), ("v", "rounded to bfloat16")]
)
def test_what_no_side_shows_is_explained_from_what_came_before(
    joined, trainer, few, folder, op, says
) -> None:
    """Another engine, which shows q, k and v as attention takes them, but no projections."""
    run, attention = joined.run, joined.model.model.layers[MIDDLE].self_attn
    if says == HALVES:
        attention.joined = InHalves(**vars(attention.joined))
    else:
        product = attention.joined.product
        attention.joined.product = lambda x: [*product(x)[:2], product(x)[2].bfloat16().float()]

    def unseen(case, tap) -> None:
        record = tap.record
        tap.record = lambda point, x, *where: (
            x if point.op in ("q_proj", "k_proj", "v_proj") else record(point, x, *where)
        )
        run(case, tap)

    joined.run = unseen
    found = examine(ReplaySetup(few, joined, trainer, str(folder)))
    introduced = [one.point.op for one in found.comparison.results if one.status == "introduced"]
    assert introduced == (["q", "k", "v"] if says == HALVES else ["v"])
    cause = found.explanations[Point(MIDDLE, op)]
    assert len(cause.left.matches) == len(cause.right.matches) == 1
    assert says in cause.left.matches[0].description
    assert "the contract's" in cause.right.matches[0].description

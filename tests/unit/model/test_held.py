"""Parts cover each parameter, and as many ranks as a row says have equal boxes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.split import Placement, RoleSplit, plan_split
from spmd_rl.model.held.held import ENGINE, TRAINER, Holder, held_tensors, parts
from spmd_rl.model.held.tensor import Along, HeldTensor, Seat
from spmd_rl.model.layers.layer import TensorSpec
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.spec import EMBEDDING, HEAD, ModelSpec
from spmd_rl.rollout.sglang.tensor_parallel import SGLANG
from spmd_rl.weights.plan.layout import Box, disjoint
from tests.specs import dense_spec, with_experts

DENSE = dense_spec("qwen3", vocab=93, hidden=32, inner=48, layers=2, heads=(8, 2, 8), positions=9)
BIASED = dense_spec("qwen2", vocab=93, hidden=32, inner=48, layers=2, heads=(8, 8, 8), positions=9)
MIXTURE = with_experts(DENSE, 8, 2, 16)
SPLITS = {
    "one rank": (DENSE, RoleSplit("1")),
    "fsdp": (DENSE, RoleSplit("3")),
    "dp and fsdp": (BIASED, RoleSplit("6", dp=2)),
    "cp": (DENSE, RoleSplit("4", cp=2)),
    "tp": (DENSE, RoleSplit("4", tp=4)),
    "dp, fsdp and tp": (DENSE, RoleSplit("8", dp=2, tp=2)),
    "cp and tp": (BIASED, RoleSplit("8", cp=2, tp=2)),
    "ep": (MIXTURE, RoleSplit("4", ep=4)),
    "ep over copies": (MIXTURE, RoleSplit("8", dp=2, ep=2)),
    "ep and cp": (MIXTURE, RoleSplit("8", cp=2, ep=4)),
}


def along(placement: Placement, rank: int, *axes: str) -> Along:
    ranks = placement.ranks_along(rank, axes)
    return Along(ranks.index(rank), len(ranks))


def seat(placement: Placement, rank: int) -> Seat:
    """The seat of a rank, from the grid of its role alone."""
    return Seat(
        tp=along(placement, rank, "tp"),
        ep=along(placement, rank, "ep"),
        shards=along(placement, rank, "fsdp", "cp"),
        expert_shards=along(placement, rank, "edp"),
        replicas=size_of(placement.axes, "dp"),
    )


def tables(spec: ModelSpec, split: RoleSplit) -> list[dict[str, HeldTensor]]:
    placement = plan_split({"train": split}, 8)["train"]
    return [held_tensors(spec, seat(placement, rank), TRAINER) for rank in placement.ranks]


def problems(held: list[dict[str, HeldTensor]]) -> list[str]:
    """What does not hold of a parameter: that boxes cover it, and that copies are counted."""
    found = []
    for name, row in held[0].items():
        boxes = [table[name].box for table in held]
        copies = Counter(box for box in boxes if box.num_elements)
        if not disjoint(copies) or sum(map(count, copies)) != row.spec.num_elements:
            found.append(f"{name} is not covered once")
        wrong = [
            table[name].copies
            for table, box in zip(held, boxes, strict=True)
            if box.num_elements and not row.spec.is_fixed and copies[box] != table[name].copies
        ]
        if wrong:
            found.append(f"{name} has other copies than {wrong}")
    return found


def count(box: Box) -> int:
    return box.num_elements


@pytest.mark.parametrize("name", SPLITS)
def test_boxes_cover_each_parameter_and_copies_are_counted(name: str) -> None:
    held = tables(*SPLITS[name])
    assert set(held[0]) == set(SPLITS[name][0].parameter_shapes())
    assert problems(held) == []


def test_a_wrong_seat_is_seen() -> None:
    held = tables(DENSE, RoleSplit("4", tp=2))
    assert problems(held) == []
    assert problems([held[1], *held[1:]]) != []
    fewer = {name: row._replace(copies=row.copies + 1) for name, row in held[0].items()}
    assert len(problems([fewer, *held[1:]])) == len(fewer)


def test_experts_are_whole_on_their_owners_and_shared_by_blocks() -> None:
    held = tables(MIXTURE, RoleSplit("4", ep=2))
    for name, row in held[0].items():
        if row.spec.expert is None:
            assert row.axis == "" and row.is_here
            continue
        assert (row.axis, row.owner) == ("ep", row.spec.expert // 4)
        assert [table[name].is_here for table in held] == [
            rank % 2 == row.owner for rank in range(4)
        ]
        assert row.part_of(row.owner).extent == row.spec.shape
        assert row.part_of(1 - row.owner).num_elements == 0


def test_an_engine_has_its_embedding_whole_and_a_trainer_a_part() -> None:
    spec = replace(DENSE, tie_embeddings=False)
    engine, trainer = (parts(spec, Along(1, 4), holder) for holder in (ENGINE, TRAINER))
    assert engine[EMBEDDING] == Box((0, 0), (93, 32))
    assert trainer[EMBEDDING] == engine[HEAD] == Box((24, 0), (24, 32))
    assert parts(spec, Along(3, 4), ENGINE)[HEAD] == Box((72, 0), (21, 32))
    padded = parts(spec, Along(3, 4), SGLANG)[HEAD]
    assert padded == Box((93, 0), (0, 32)), "of 128 rows the last 32 pad it"


def test_sglang_gives_blocks_of_experts_to_its_ranks() -> None:
    first, second = (parts(MIXTURE, Along(rank, 2), SGLANG) for rank in range(2))
    for tensor in MIXTURE.parameters():
        if tensor.expert is not None:
            has, lacks = (first, second) if tensor.expert < 4 else (second, first)
            assert has[tensor.name].extent == tensor.shape
            assert lacks[tensor.name].num_elements == 0


def test_parameters_beside_the_model_are_rows_too() -> None:
    adapter = TensorSpec("model.layers.0.self_attn.q_proj.lora_A.weight", (3, 32))
    shards = Seat(shards=Along(1, 2))
    held = held_tensors(DENSE, shards, Holder(), "value", [adapter])
    assert held[adapter.name].box == Box((2, 0), (1, 32))
    assert "score.weight" in held and HEAD not in held


def test_adapters_of_an_expert_are_where_it_is() -> None:
    adapters = list(LoraConfig(rank=2).tensors(MIXTURE))
    for index in range(2):
        seat = Seat(ep=Along(index, 2), expert_shards=Along(0, 3))
        held = held_tensors(MIXTURE, seat, TRAINER, adapters=adapters)
        for adapter in adapters:
            layer = adapter.name.rpartition(".lora_")[0]
            row, base = held[adapter.name], held[f"{layer}.weight"]
            assert (row.axis, row.owner, row.shards) == (base.axis, base.owner, base.shards)

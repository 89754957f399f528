"""Weight pushes over real gloo ranks: split, colocated and mixed, to engines of either dtype.

Each split reads TRAIN/INFER (`0-0/1-1` is one rank and one rank).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import alias, execute
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.plan.layout import Layout
from spmd_rl.weights.plan.moves import plan_moves
from spmd_rl.weights.proof.digest import combine, digest
from spmd_rl.weights.proof.verification import Verifier
from spmd_rl.weights.tensor_ends import TensorSink
from tests.dist.torchrun import on_ranks
from tests.dist.train_case import local_weights, write_model_folder
from tests.dist.trainers import gathered, train

pytestmark = pytest.mark.dist

Report = dict[str, Any]
TWO_RANKS = ("0-0/1-1", "all/all", "0-0/all")
FOUR_RANKS = ("0-1/all", "0-2/3-3")
CHANGED = "model.embed_tokens.weight"
DTYPES = ("float32", "bfloat16")
CASES = [f"{split} {dtype}" for split in (*TWO_RANKS, *FOUR_RANKS) for dtype in DTYPES]
SMALL_BUCKET_BYTES = 1000


def layouts(tensors: LocalTensors | None, rank: int) -> list[Layout]:
    return [one for one in gathered(tensors.layout(rank) if tensors else None) if one is not None]


def whole_digest(tensors: LocalTensors | None, rank: int, dtypes: dict[str, str]) -> dict[str, int]:
    parts = gathered((tensors.layout(rank), digest(tensors, dtypes)) if tensors else None)
    return combine([part for part in parts if part is not None])


def found_by(verifier: Verifier) -> dict[str, object]:
    """What a rank finds when it compares: counts, and what differs."""
    found = verifier.compare(dist.group.WORLD)
    return {
        "equal": found.num_equal,
        "shared": found.num_shared,
        "unequal": [(one.name, one.rank, one.sources) for one in found.mismatches],
    }


def run(work: Path, split: str, dtype: torch.dtype, meshes: Meshes) -> Report:
    """A trainer takes steps on some ranks. After each, its weights are pushed to whole models on
    others. What arrives is told of each push.
    """
    rank = meshes.world.rank
    train_ranks, infer_ranks = split.split("/")
    placements = plan_split(
        {"train": RoleSplit(train_ranks), "infer": RoleSplit(infer_ranks)}, meshes.world.size
    )
    meshes.build(list(placements.values()))
    trainer = engine = None
    if rank in placements.train.ranks:
        trainer = Trainer(
            TrainerConfig(init="random", lr=1e-2), meshes.context(placements.train), str(work)
        )
    if rank in placements.infer.ranks:
        engine = CausalLM(read_spec(work)).to(dtype).requires_grad_(False)
    src = LocalTensors(local_weights(trainer)) if trainer else None
    dst = LocalTensors.whole(dict(engine.named_parameters())) if engine else None
    sources, destinations = layouts(src, rank), layouts(dst, rank)
    weight_plan = plan_moves(sources, destinations, None, rank)
    dtypes = {piece.name: piece.dtype for piece in destinations[0].pieces}
    source = trainer.weight_source() if trainer else None
    sink = TensorSink(dst.items(), lambda: None, lambda version: None) if dst else None
    shared = alias(source, sink, rank) if source and sink else frozenset()
    aliased = sum(dst[name].local.nbytes for name, _ in shared) if dst else 0
    ends = LocalEnds(rank, source, sink, torch.device("cpu"), shared)
    verifier = Verifier(weight_plan.moves, weight_plan.replicas, ends)
    pushes = []
    for seed in range(2):
        if trainer:
            train(trainer, [seed])
        traffic = gathered(
            vars(execute(weight_plan.moves, ends, dist.group.WORLD, SMALL_BUCKET_BYTES))
        )
        source_digest, arrived_digest = (
            whole_digest(src, rank, dtypes),
            whole_digest(dst, rank, dtypes),
        )
        pushes.append(
            {
                "traffic": traffic,
                "found": gathered(found_by(verifier)),
                "equal": source_digest == arrived_digest,
                "digests": {k: str(v) for k, v in arrived_digest.items()},
            }
        )
    if dst:
        next(iter(dst.values())).local.view(-1)[3] += 1
    corrupted = (
        digest(dst, dtypes) != {k: int(v) for k, v in pushes[-1]["digests"].items()}
        if dst
        else True
    )
    found = gathered(found_by(verifier))
    return {
        "found_corrupted": found,
        "plans": gathered(weight_plan.digest),
        "wire_bytes": weight_plan.wire_bytes,
        "local_bytes": weight_plan.local_bytes,
        "aliased": gathered(aliased),
        "pushes": pushes,
        "corruption_seen": all(gathered(corrupted)),
    }


def on_rank(world: World, work: Path, splits: tuple[str, ...]) -> dict[str, Report]:
    meshes = Meshes(world)
    return {
        f"{split} {dtype}": run(work, split, getattr(torch, dtype), meshes)
        for split in splits
        for dtype in DTYPES
    }


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def reports(work: Path) -> Report:
    return on_ranks(on_rank, 2, work, TWO_RANKS)[0] | on_ranks(on_rank, 4, work, FOUR_RANKS)[0]


@pytest.fixture(params=CASES)
def report(request: pytest.FixtureRequest, reports: Report) -> Report:
    return reports[request.param] | {
        "split": request.param.split()[0],
        "dtype": request.param.split()[1],
    }


def _model_bytes(work: Path, dtype: str) -> int:
    with torch.device("meta"):
        return (
            sum(one.numel() for one in CausalLM(read_spec(work)).parameters())
            * getattr(torch, dtype).itemsize
        )


def test_all_ranks_make_the_same_plan(report: Report) -> None:
    assert len(set(report["plans"])) == 1


def test_each_push_brings_the_trainer_s_weights_of_that_step(report: Report) -> None:
    first, second = report["pushes"]
    assert first["equal"]
    assert second["equal"]
    assert not set(first["digests"].values()) & set(second["digests"].values())
    assert report["corruption_seen"]


def test_each_rank_finds_its_push_equal_and_a_changed_element_wrong(report: Report) -> None:
    """The same element is changed on every engine. Where one shares the trainer's memory, that is
    the trainer's value, which all engines then hold.
    """
    num_tensors = len(report["pushes"][0]["digests"])
    engines = {"0-0/1-1": [1], "0-2/3-3": [3], "all/all": [0, 1], "0-0/all": [0, 1]}
    ranks = engines.get(report["split"], [0, 1, 2, 3])
    for push in report["pushes"]:
        for rank, found in enumerate(push["found"]):
            assert found["unequal"] == []
            assert found["equal"] + found["shared"] == (num_tensors if rank in ranks else 0)
    for rank, found in enumerate(report["found_corrupted"]):
        differs = rank in ranks and not report["aliased"][0]
        assert [one[:2] for one in found["unequal"]] == ([[CHANGED, rank]] if differs else [])


def test_traffic_is_what_the_plan_says(report: Report, work: Path) -> None:
    whole = _model_bytes(work, report["dtype"])
    num_engines = {"0-0/1-1": 1, "all/all": 2, "0-0/all": 2, "0-1/all": 4, "0-2/3-3": 1}[
        report["split"]
    ]
    assert report["wire_bytes"] + report["local_bytes"] == num_engines * whole
    for push in report["pushes"]:
        sums = {key: sum(rank[key] for rank in push["traffic"]) for key in push["traffic"][0]}
        assert sums["sent_bytes"] == sums["received_bytes"] == report["wire_bytes"]
        assert sums["aliased_bytes"] + sums["copied_bytes"] == report["local_bytes"]


def test_a_lone_trainer_s_engine_shares_its_memory(reports: Report, work: Path) -> None:
    """One trainer, engines there and on a second rank: the first is aliased, only the second is
    sent to.
    """
    whole = _model_bytes(work, "float32")
    assert reports["0-0/all float32"]["aliased"] == [whole, 0]
    for push in reports["0-0/all float32"]["pushes"]:
        assert push["traffic"][0] == {
            "aliased_bytes": whole,
            "copied_bytes": 0,
            "sent_bytes": whole,
            "received_bytes": 0,
        }
    assert reports["0-0/all bfloat16"]["aliased"] == [0, 0]


def test_engines_hold_the_same_whatever_the_split(reports: Report) -> None:
    """One train rank: split and colocated engines get the same bits."""
    for dtype in ("float32", "bfloat16"):
        split, colocated = (reports[f"{name} {dtype}"]["pushes"] for name in ("0-0/1-1", "0-0/all"))
        assert [push["digests"] for push in split] == [push["digests"] for push in colocated]

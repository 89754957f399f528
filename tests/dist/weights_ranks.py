"""Run under torchrun by test_weights.py: `weights_ranks.py WORK_FOLDER OUT.json SPLIT...`.

Each SPLIT reads TRAIN/INFER (`0-0/1-1` is one rank and one rank). For each, a trainer on some ranks
takes steps, and after each step its weights are pushed to whole models on others; what arrived is
reported per push and dtype.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
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
from tests.dist.train_case import local_weights, make_batch

SMALL_BUCKET_BYTES = 1000


def gathered(value: object) -> list:
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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


def run(work: Path, split: str, dtype: torch.dtype, meshes: Meshes) -> dict[str, object]:
    rank = meshes.world.rank
    train, infer = split.split("/")
    placements = plan_split(
        {"train": RoleSplit(train), "infer": RoleSplit(infer)}, meshes.world.size
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
            context = trainer.context
            trainer.train_step(
                make_batch(seed).shard(context.data_size)[context.data_rank], grpo_loss
            )
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


def main(work: Path, out: Path, splits: list[str]) -> None:
    world = World.from_env()
    join(world, open_store(world))
    meshes = Meshes(world)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    report = {
        f"{split} {name}": run(work, split, dtype, meshes)
        for split in splits
        for name, dtype in dtypes.items()
    }
    if world.rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])

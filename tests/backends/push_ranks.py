"""Run under torchrun by test_megatron_push.py: `push_ranks.py MODEL_FOLDER OUT.json`.

A trainer with tp 2 x pp 2 on ranks 0 to 3 takes steps. After each step its weights are pushed to
whole models on ranks 3 and 4. Each rank reports what it held and moved.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import execute
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.plan.layout import Box, Layout, Piece
from spmd_rl.weights.plan.moves import plan_moves
from spmd_rl.weights.tensor_ends import TensorSink, TensorSource
from tests.backends.megatron_case import make_batch
from tests.dist.test_weights import SMALL_BUCKET_BYTES
from tests.dist.trainers import gathered

TRAIN, INFER = RoleSplit("0-3", tp=2, pp=2), RoleSplit("3-4")
LR = 1e-2


class NotingSource(TensorSource):
    """A source that notes the boxes that a push asks it for."""

    def __init__(self, source: TensorSource) -> None:
        super().__init__(source._pieces.named(), source.open)
        self.asked: list[tuple[str, Box]] = []

    def view(self, name: str, box: Box) -> Tensor | None:
        self.asked.append((name, box))
        return super().view(name, box)

    def read(self, name: str, box: Box, out: Tensor) -> None:
        self.asked.append((name, box))
        super().read(name, box, out)


def run(folder: str, meshes: Meshes, dtype: torch.dtype) -> dict[str, Any]:
    rank = meshes.world.rank
    placements = plan_split({"train": TRAIN, "infer": INFER}, meshes.world.size)
    meshes.build(list(placements.values()))
    trainer = engine = source = sink = None
    if rank in placements.train.ranks:
        cfg = TrainerConfig(backend=MegatronConfig(), lr=LR, max_tokens=100)
        trainer = Trainer(cfg, meshes.context(placements.train), folder)
        source = NotingSource(trainer.weight_source())
    if rank in placements.infer.ranks:
        engine = CausalLM(read_spec(folder)).to(dtype).requires_grad_(False)
        whole = LocalTensors.whole(dict(engine.named_parameters()))
        sink = TensorSink(whole.items(), lambda: None, lambda version: None)
    sources, destinations = all_layouts(source, rank), all_layouts(sink, rank)
    plan = plan_moves(sources, destinations, None, rank)
    ends = LocalEnds(rank, source, sink, torch.device("cpu"))
    pushes = []
    for seed in range(2):
        if trainer:
            trainer.train_step(make_batch(seed), grpo_loss)
        before = [one.clone() for one in engine.parameters()] if engine else []
        traffic = vars(execute(plan.moves, ends, dist.group.WORLD, SMALL_BUCKET_BYTES))
        expected = whole_weights(trainer, dtype)
        named = list(engine.named_parameters()) if engine else []
        unequal = [name for name, one in named if not torch.equal(one, expected[name])]
        stale = [name for (name, one), old in zip(named, before, strict=True) if one.equal(old)]
        pushes.append({"unequal": unequal, "stale": stale, **traffic})
    own, asked = (source.layout(rank).pieces, source.asked) if source else ((), [])
    return {
        "held_bytes": sum(num_bytes(piece.box, dtype) for piece in own),
        "whole_bytes": sum(num_bytes(piece.box, dtype) for piece in destinations[0].pieces),
        "most_boxes_of_a_tensor": most_boxes(own),
        "asked_beyond": [one for one in asked if not is_in(one, own)],
        "most_asked_bytes": max((num_bytes(box, dtype) for _, box in asked), default=0),
        "pushes": pushes,
        "plan": plan.digest,
    }


def whole_weights(trainer: Trainer | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The trainer's weights, gathered for the comparison and sent to all ranks of the world."""
    found: list[Any] = [None]
    if trainer:
        backend = trainer.backend
        found = [{name: backend.gather(name).to(dtype) for name in backend.names()}]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def all_layouts(end: TensorSource | TensorSink | None, rank: int) -> list[Layout]:
    return [one for one in gathered(end.layout(rank) if end else None) if one is not None]


def num_bytes(box: Box, dtype: torch.dtype) -> int:
    return box.num_elements * dtype.itemsize


def most_boxes(pieces: tuple[Piece, ...]) -> int:
    names = [piece.name for piece in pieces]
    return max(map(names.count, names), default=0)


def is_in(asked: tuple[str, Box], pieces: tuple[Piece, ...]) -> bool:
    name, box = asked
    return any(
        piece.name == name
        and all(a >= b for a, b in zip(box.offset, piece.box.offset, strict=True))
        and all(a <= b for a, b in zip(box.end, piece.box.end, strict=True))
        for piece in pieces
    )


def main(folder: str, out: Path) -> None:
    torch.set_num_threads(1)
    world = World.from_env()
    join(world, open_store(world))
    meshes = Meshes(world)
    report = {name: gathered(run(folder, meshes, getattr(torch, name))) for name in DTYPES}
    if world.rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


DTYPES = "float32", "bfloat16"

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

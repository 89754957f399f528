"""Run under torchrun by test_tensor_ranks.py: `tensor_ranks.py MODEL SPLIT OUT.json`, on as many
GPUs as have parts of a model or of its sequences in SPLIT. Log-probs are told as bits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import Placement, RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.trainer import Trainer
from tests.dist.trainers import gradients, logprobs, top, train_on_all_scores

ONE = RoleSplit(ranks="0-0")
SHARED = {"tp 2": RoleSplit(tp=2), "tp 2, cp 2": RoleSplit(tp=2, cp=2)}
NUM_RANKS = {name: one.tp * one.cp for name, one in SHARED.items()}
BACKENDS = {
    "slopes": Fsdp2Config(),
    "cheap": Fsdp2Config(recompute="cheap", wrap="layer"),
    "all": Fsdp2Config(recompute="all", wrap="layer"),
    "moments": Fsdp2Config(offload="moments"),
    "master": Fsdp2Config(offload="master"),
}


def backends_of(placement: Placement) -> list[str]:
    """Master weights of one shard alone can sleep."""
    return [name for name in BACKENDS if name != "master" or placement.of_shards.axes["fsdp"] == 1]


def main(model: Path, shared: str, out: Path) -> None:
    world = World.from_env()
    join(world, open_store(world))
    meshes = Meshes(world)
    splits = {"one": ONE, shared: SHARED[shared]}
    placements = {
        name: plan_split({"train": one}, world.size).train for name, one in splits.items()
    }
    meshes.build(list(placements.values()))
    report: dict[str, Any] = {name: {} for name in ("first", "top", "scores", "alike")}
    for split, placement in placements.items():
        if world.rank not in placement.ranks:
            continue

        def built(backend: str, row_shards: int = 2, placement: Any = placement) -> Trainer:
            cfg = TrainerConfig(
                init="random", lr=1e-2, max_tokens=120, logit_rows=32, backend=BACKENDS[backend]
            )
            return Trainer(cfg, meshes.context(placement, row_shards), str(model))

        trainer = built("slopes")
        report["first"][split], report["top"][split] = logprobs(trainer), top(trainer)
        for backend in backends_of(placement):
            found, alike = gradients(built(backend))
            report["alike"][f"{split}, {backend}"] = alike
            if world.rank == 0:
                save_file(found, out.parent / f"{split}, {backend}.safetensors")
        report["scores"][split] = train_on_all_scores(trainer)
        if split == "one":
            report["first"]["one sum"] = logprobs(built("slopes", row_shards=1))
    dist.barrier()
    if world.rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))

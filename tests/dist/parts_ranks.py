"""Run under torchrun by test_data_parts.py: `parts_ranks.py DENSE MIXTURE OUT.json`, on 4 ranks.

Trainers on 1, 2 and 4 of the ranks learn from the same batches, in 4 or 8 parts. Weights and
moments are told as digests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.model.lora import LoraConfig
from spmd_rl.train.config import Fsdp2Config, OptimizerConfig, TrainerConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from tests.dist.checkpoint_ranks import digests
from tests.dist.train_case import make_batch

NUM_PARTS, STEPS = 4, 2
SPLITS = {
    "one": RoleSplit(ranks="0-0"),
    "two": RoleSplit(ranks="0-1"),
    "four": RoleSplit(),
    "two, cp 2": RoleSplit(cp=2),
    "one, cp 2": RoleSplit(ranks="0-1", cp=2),
    "two, tp 2": RoleSplit(tp=2),
    "one, tp 2": RoleSplit(ranks="0-1", tp=2),
    "four, ep 2": RoleSplit(ep=2),
}
CONFIG = TrainerConfig(
    init="random",
    lr=1e-2,
    eps=1e-4,
    weight_decay=0.1,
    max_tokens=120,
    minibatches=2,
    clip_norm=0.05,
    deterministic=True,
    data_parts=NUM_PARTS,
)
LAYERS = Fsdp2Config(wrap="layer")
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "whole": (("one", "two", "four"), {}),
    "layers": (("one", "two", "four"), {"backend": LAYERS, "minibatches": 1}),
    "eight parts": (("one", "four"), {"data_parts": 8, "backend": LAYERS}),
    "adapters": (("one", "four"), {"lora": LoraConfig(rank=4)}),
    "muon": (("one", "four"), {"optimizer": OptimizerConfig(kind="muon")}),
    "sequences": (("one, cp 2", "two, cp 2"), {}),
    "matrices": (("one, tp 2", "two, tp 2"), {}),
    "layers of matrices": (("one, tp 2", "two, tp 2"), {"backend": LAYERS}),
    "mixture": (("one", "four, ep 2"), {"backend": LAYERS}),
    "off": (("one", "four"), {"data_parts": 0}),
}
Deal = Callable[[Batch, int, int], Batch]


def in_turn(batch: Batch, ranks: int, rank: int) -> Batch:
    return batch.shard(ranks, NUM_PARTS)[rank]


def in_blocks(batch: Batch, ranks: int, rank: int) -> Batch:
    """A rank's share where it has neighbouring parts, whose sum comes first then."""
    shards = [in_turn(batch, NUM_PARTS, part) for part in range(NUM_PARTS)]
    own = shards[rank * NUM_PARTS // ranks : (rank + 1) * NUM_PARTS // ranks]
    index = [one for shard in own for one in shard.index.tolist()]
    sizes = tuple(shard.num_sequences for shard in own)
    return replace(batch.select(index), part_sizes=sizes if len(sizes) > 1 else ())


def train(trainer: Trainer, first: int, count: int, deal: Deal | None = None) -> list[str]:
    """Take some steps, and return the norms of their gradients as bits."""
    context, found = trainer.context, []
    for seed in range(first, first + count):
        batch, ranks, rank = make_batch(seed), context.data_size, context.data_rank
        own = batch.shard(ranks, trainer.cfg.data_parts)[rank]
        own = own if deal is None else deal(batch, ranks, rank)
        found.append(trainer.train_step(own, grpo_loss)["train/grad_norm"].hex())
    return found


def main(dense: Path, mixture: Path, out: Path) -> None:
    torch.set_num_threads(1)
    world = World.from_env()
    join(world, open_store(world))
    meshes = Meshes(world)
    placements = {name: plan_split({"train": one}, 4).train for name, one in SPLITS.items()}
    meshes.build(list(placements.values()))
    report: dict[str, Any] = {case: {} for case in CASES}

    def built(split: str, model: Path, **settings: Any) -> Trainer:
        cfg = replace(CONFIG, **settings)
        return Trainer(cfg, meshes.context(placements[split]), str(model))

    def on(split: str) -> bool:
        return world.rank in placements[split].ranks

    for case, (splits, settings) in CASES.items():
        for split in filter(on, splits):
            trainer = built(split, mixture if case == "mixture" else dense, **settings)
            norms = train(trainer, 0, STEPS)
            report[case][split] = norms, digests(trainer)
        dist.barrier()
    if on("two"):
        saved = built("two", dense)
        train(saved, 0, 1)
        saved.save(str(out.parent / "saved"))
        saved.wait_until_saved()
        report["blocks"] = train(built("two", dense), 0, STEPS, in_blocks)
    dist.barrier()
    report["resumed"] = {}
    for split in filter(on, ("one", "two", "four")):
        resumed = built(split, dense, seed=7)
        resumed.load(str(out.parent / "saved"))
        norms = train(resumed, 1, STEPS - 1)
        report["resumed"][split] = norms, digests(resumed), resumed.resume_differences()
    if world.rank == 0:
        out.write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))

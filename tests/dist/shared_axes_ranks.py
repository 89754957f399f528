"""Run under torchrun by test_shared_axes.py: `shared_axes_ranks.py MIXTURE QWEN DENSE OUT.json`, on
4 ranks: mixtures whose ranks share matrices too, and critics and frozen models on such ranks.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.parts.part import ModelPart
from spmd_rl.train.config import FrozenConfig, Fsdp2Config
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.value_trainer import ValueTrainer
from tests.dist.checkpoint_ranks import digests, logprobs, step
from tests.dist.roles_ranks import in_order, own_shard, squares
from tests.dist.sequence_ranks import top
from tests.dist.tensor_ranks import CONFIG, Runs, gradients
from tests.dist.train_case import make_batch

SPLITS = {
    "alone": RoleSplit(),
    "tp 2": RoleSplit(tp=2),
    "tp 2, ep 2": RoleSplit(tp=2, ep=2),
    "tp 2, ep 4": RoleSplit(tp=2, ep=4),
    "tp 4, ep 2": RoleSplit(tp=4, ep=2),
    "tp 2, cp 2": RoleSplit(tp=2, cp=2),
    "cp 2, ep 4": RoleSplit(cp=2, ep=4),
}
EXPERTS = {"ep 2": RoleSplit(ep=2), "ep 4": RoleSplit(ep=4)}
DENSE = ("alone", "tp 2", "tp 2, cp 2")
BALANCED = ("alone", "tp 2", "tp 2, ep 4")
ADAPTED = ("alone", "ep 2", "ep 4")
RESUMED = {"alone": "tp 2, ep 4", "tp 2, ep 2": "alone"}


class Roles(Runs):
    """Policies, critics and frozen models of one split after the other."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.placements = {
            name: plan_split({"train": one}, 4).train for name, one in (SPLITS | EXPERTS).items()
        }
        self.meshes.build(list(self.placements.values()))

    def frozen(self, split: str, folder: Path) -> list[str]:
        context = self.meshes.context(self.placements[split], 4)
        cfg = replace(FrozenConfig.like(CONFIG), wrap="auto")
        model = FrozenModel(cfg, context, str(folder))
        return in_order(context, model.score(own_shard(context, 5)))

    def critic(self, split: str, folder: Path) -> dict[str, Any]:
        """Values before and after steps, and what these say."""
        context = self.meshes.context(self.placements[split], 4)
        critic = ValueTrainer(CONFIG, context, str(folder))
        first = in_order(context, critic.values(own_shard(context, 5)))
        steps = [critic.train_step(own_shard(context, seed), squares) for seed in (0, 1, 2)]
        names = ("train/loss", "train/grad_norm")
        return {"first": first, "steps": [[one[name] for name in names] for one in steps]}


def adapted(runs: Roles, split: str, folder: Path) -> list[Any]:
    """What adapters of a mixture are after two steps, and what they compute."""
    lora = LoraConfig(rank=32, alpha=64)  # shards are multiples of 32 elements
    backend = Fsdp2Config(wrap="layer")
    trainer = runs.built(split, folder, lora=lora, deterministic=True, backend=backend)
    first = logprobs(trainer)
    for seed in (0, 1):
        step(trainer, seed)
    whole = {name: trainer.backend.gather(name).detach() for name in trainer.backend.names()}
    bits = {name: np.asarray(one).tobytes().hex() for name, one in whole.items()}
    return [first, logprobs(trainer), digests(trainer), bits]


def main(mixture: Path, qwen: Path, dense: Path, out: Path) -> None:
    torch.set_num_threads(1)
    runs, folder = Roles(mixture), out.parent
    report = dict[str, Any](scores={}, top={}, alike={}, frozen={}, critic={}, dense={})
    for split in SPLITS:
        trainer = runs.built(split)
        report["scores"][split] = logprobs(trainer)
        report["top"][split] = top(trainer)
        report["frozen"][split] = runs.frozen(split, mixture)
        values, report["alike"][split] = gradients(trainer)
        if runs.world.rank == 0:
            save_file(values, folder / f"{split}.safetensors")
    for split in DENSE:
        report["critic"][split] = runs.critic(split, dense)
        report["dense"][split] = runs.frozen(split, dense)
    report["critic of a mixture"] = [
        runs.critic(split, mixture) for split in ("alone", "tp 2, ep 4")
    ]
    for split in BALANCED:
        batch = replace(make_batch(0), advantages=np.zeros_like(make_batch(0).advantages))
        values, _ = gradients(runs.built(split, qwen, router_aux_loss_coef=0.5), batch)
        if runs.world.rank == 0:
            save_file(values, folder / f"balanced {split}.safetensors")
    report["adapted"] = {split: adapted(runs, split, qwen) for split in ADAPTED}
    report["resumed"] = {}
    for split, other in RESUMED.items():
        saved = runs.saved(split, folder / f"saved {split}")
        report["resumed"][split] = saved, runs.resumed(other, folder / f"saved {split}")
    backend = Fsdp2Config(recompute="all", wrap="layer")
    again, plain = (
        runs.built("tp 2, ep 2", deterministic=True, backend=one)
        for one in (backend, Fsdp2Config(wrap="layer"))
    )
    for one in (again, plain):
        step(one, 0)
    report["recomputed"] = digests(again) == digests(plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelPart, "own_rows", lambda part, size: slice(0, size // part.count))
        report["control"] = logprobs(runs.built("tp 2, ep 2"))
    if runs.world.rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

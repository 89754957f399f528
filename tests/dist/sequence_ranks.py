"""Run under torchrun by test_sequence_shards.py: `sequence_ranks.py DENSE MIXTURE OUT.json`, on 4
ranks, where 1, 2 and 4 of them share the tokens of sequences. Log-probs are told as bits.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmd_rl.kernels.attention import shared_tokens
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.model.lora import LoraConfig
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.train.training_role import TrainingRole
from spmd_rl.train.value_trainer import ValueTrainer
from tests.dist.checkpoint_ranks import digests, logprobs, step
from tests.dist.train_case import make_batch
from tests.dist.train_ranks import train_on_all_scores

SPLITS = {
    "cp 1": RoleSplit(),
    "cp 2": RoleSplit(cp=2),
    "cp 4": RoleSplit(cp=4),
    "2 copies, cp 2": RoleSplit(dp=2, cp=2),
    "cp 2, ep 2": RoleSplit(cp=2, ep=2),
}
DENSE = ("cp 1", "cp 2", "cp 4", "2 copies, cp 2")
MIXTURE = ("cp 1", "cp 2", "cp 2, ep 2")
CONFIG = TrainerConfig(init="random", lr=1e-2, eps=1e-4, max_tokens=60)
LORA = LoraConfig(rank=4, alpha=8.0)


def gradients(trainer: TrainingRole, seed: int = 0) -> dict[str, Tensor]:
    """The whole gradients of a train step that leaves the weights alone."""
    backend, found = trainer.backend, dict[str, Tensor]()

    def watched(lr: float, scale: float) -> None:
        for name, one in backend.parameters.items():
            grad = one.grad
            assert grad is not None
            found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        backend.discard()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "step", watched)
        step(trainer, seed)
    return found


def values(trainer: ValueTrainer) -> list[str]:
    return [one.hex() for one in trainer.values(make_batch(5)).values.tolist()]


def top(trainer: Trainer) -> list[Any]:
    """Of a batch that all ranks have, whatever shards there are."""
    found = trainer.top_logprobs(make_batch(5), 3)
    return [found.ids.values.tolist(), found.logprobs.values.tobytes().hex()]


def in_wrong_order(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What other ranks have for this one, each in the place of its neighbour."""
    return EXCHANGED(x, group).roll(1, 0)


EXCHANGED = shared_tokens._exchanged


def main(dense: Path, mixture: Path, out: Path) -> None:
    torch.set_num_threads(1)
    world = World.from_env()
    join(world, open_store(world))
    meshes = Meshes(world)
    placements = {name: plan_split({"train": one}, 4).train for name, one in SPLITS.items()}
    meshes.build(list(placements.values()))

    def built(split: str, model: Path = dense, role: Any = Trainer, **settings: Any) -> Any:
        cfg = replace(CONFIG, **settings)
        return role(cfg, meshes.context(placements[split]), str(model))

    report: dict[str, Any] = {
        name: {} for name in ("dense", "mixture", "lora", "coded", "value", "top")
    }
    for split in DENSE:
        trainer = built(split)
        report["dense"][split] = logprobs(trainer)
        report["top"][split] = top(trainer)
        found = gradients(trainer)
        if world.rank == 0:
            save_file(found, out.parent / f"{split}.safetensors")
    report["scores"] = [train_on_all_scores(built(split)) for split in ("cp 1", "cp 2")]
    for recompute in ("none", "cheap", "all"):
        backend = Fsdp2Config(recompute=recompute, wrap="layer")
        trainer = built("cp 4", deterministic=True, backend=backend)
        step(trainer, 0)
        report[recompute] = digests(trainer)
    for split in MIXTURE:
        report["mixture"][split] = logprobs(built(split, mixture))
    for split in ("cp 1", "cp 2"):
        adapted = built(split, lora=LORA)
        adapted.backend.fill((name, ones) for name, ones in _ones(adapted))
        report["lora"][split] = logprobs(adapted)
        report["coded"][split] = logprobs(built(split, weights="e4m3", cache="e4m3"))
        report["value"][split] = values(built(split, role=ValueTrainer))
    saved = built("cp 2")
    saved.export_hf(str(out.parent / "hf"))
    step(saved, 0)
    saved.save(str(out.parent / "saved"))
    saved.wait_until_saved()
    report["saved"] = digests(saved), logprobs(saved)
    resumed = built("cp 1", seed=7)
    resumed.load(str(out.parent / "saved"))
    report["resumed"] = digests(resumed), logprobs(resumed)
    report["differences"] = resumed.resume_differences()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_tokens, "_exchanged", in_wrong_order)
        report["control"] = logprobs(built("cp 2"))
    if world.rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


def _ones(trainer: TrainingRole) -> list[tuple[str, Tensor]]:
    """Adapters that change what the model computes."""
    return [
        (name, torch.full_like(trainer.backend.gather(name), 0.1))
        for name in trainer.backend.names()
        if name.endswith("lora_B.weight")
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))

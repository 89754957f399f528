"""Run under torchrun by test_offload.py: `offload_ranks.py MODEL DP OUT.json SAVED`.

Trains with everything on the device, and with moments, master weights and activations in host
memory, and writes digests of what each leaves.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.fsdp2 import activation_offload
from spmd_rl.train.trainer import Trainer
from tests.dist.checkpoint_ranks import digests
from tests.dist.optimizer_ranks import train
from tests.dist.train_ranks import context_of

PLAIN = TrainerConfig(
    init="random",
    lr=1e-2,
    eps=1e-4,
    max_tokens=150,
    backend=Fsdp2Config(wrap="layer", recompute="all"),
)


def trainer_with(context: RoleContext, model: Path, offload: str, activations: bool) -> Trainer:
    backend = replace(PLAIN.backend, offload=offload, offload_activations=activations)
    return Trainer(replace(PLAIN, backend=backend), context, str(model))


def main(model: Path, dp: int, out: Path, saved: Path) -> None:
    torch.set_num_threads(1)
    activation_offload.LEAST_BYTES = 1
    context = context_of(dp)
    report: dict[str, object] = {"refused": ""}
    for name, offload, activations in (
        ("plain", "none", False),
        ("moments", "moments", True),
        ("master", "master", True),
    ):
        try:
            trainer = trainer_with(context, model, offload, activations)
        except ConfigError as error:
            report["refused"] = str(error)
            continue
        train(trainer, range(2))
        if name == "moments":
            trainer.save(str(saved))
        train(trainer, range(2, 4))
        trainer.wait_until_saved()
        report[name] = digests(trainer)
    resumed = trainer_with(context, model, "none", False)
    resumed.load(str(saved))
    train(resumed, range(2, 4))
    report["resumed"] = digests(resumed)
    if context.rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:]))

"""Run under torchrun by test_optimizers.py: `optimizer_ranks.py MODEL DP OUT.json SAVED
[SAVED_BY_OTHERS]`.

Updates the same weights by the same gradients with each optimizer, and trains with frozen
parameters and with Muon. It writes what must not depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.train.config import Fsdp2Config, OptimizerConfig, TrainerConfig
from spmd_rl.train.optimizer.optimizers import build_optimizer
from spmd_rl.train.optimizer.parameter_groups import moment_bytes, update_rules
from spmd_rl.train.trainer import Trainer
from tests.dist.checkpoint_ranks import digests
from tests.dist.optimizer_case import SHAPES, config, gradients, rate, rows, shards
from tests.dist.train_case import make_batch
from tests.dist.train_ranks import context_of

FREEZES = {
    "all but the head": ("model.*",),
    "a prefix": ("model.embed_tokens.*", "model.layers.0.*"),
    "within a unit": ("*mlp*", "*norm*"),
}


def updated(
    kind: str, group: dist.ProcessGroup, device: torch.device
) -> tuple[dict[str, str], int]:
    """Return the digests of whole weights after some steps, and the moments' most bytes."""
    rank, size = group.rank(), group.size()
    cfg = config(kind)
    held = shards(SHAPES, rank, size, device)
    rules = update_rules(SHAPES, cfg, size)
    optimizer = build_optimizer(held, rules, cfg, group)
    for step, grads in enumerate(gradients(SHAPES)):
        for name, shard in held.items():
            if shard.local.numel():
                shard.local.grad = rows(grads[name], rank, size).to(device, copy=True)
        optimizer.step(rate(step))
    found = {}
    for name, shard in held.items():
        parts: list[torch.Tensor] = [torch.empty(0)] * size
        dist.all_gather_object(parts, shard.local.detach().cpu(), group)
        found[name] = hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()
    own = sum(one.local.nbytes for tensors in optimizer.state().values() for _, one in tensors)
    sizes = [0] * size
    dist.all_gather_object(sizes, own, group)
    return found, max(sizes)


def train(trainer: Trainer, seeds: range) -> list[dict[str, float]]:
    context: RoleContext = trainer.context
    return [
        trainer.train_step(make_batch(seed).shard(context.data_size)[context.data_rank], grpo_loss)
        for seed in seeds
    ]


def weights(trainer: Trainer) -> dict[str, list[float]]:
    return {
        name: trainer.backend.gather(name).flatten().tolist() for name in trainer.backend.names()
    }


def main(model: Path, dp: int, out: Path, saved: Path, saved_by_others: str = "") -> None:
    torch.set_num_threads(1)
    context = context_of(dp)
    group = context.mesh.get_group("fsdp")
    report: dict[str, object] = {}
    for kind in ("adamw", "muon"):
        found, num_bytes = updated(kind, group, context.device)
        rules = update_rules(SHAPES, config(kind), group.size())
        planned = moment_bytes(SHAPES, rules, group.size())
        report[kind] = {"digests": found, "bytes": num_bytes, "planned": planned}
    plain = TrainerConfig(
        init="random", lr=1e-2, eps=1e-4, max_tokens=150, backend=Fsdp2Config(wrap="layer")
    )
    for name, freeze in FREEZES.items():
        trainer = Trainer(replace(plain, freeze=freeze), context, str(model))
        report[name] = {"steps": train(trainer, range(3)), "weights": weights(trainer)}
    cfg = replace(plain, optimizer=OptimizerConfig("muon"), freeze=("*embed*",))
    trainer = Trainer(cfg, context, str(model))
    steps = train(trainer, range(2))
    trainer.save(str(saved))
    trainer.wait_until_saved()
    report["trained"] = {"steps": steps, "weights": weights(trainer)}
    before = digests(trainer)
    train(trainer, range(2, 4))
    resumed = Trainer(replace(cfg, seed=5), context, str(model))
    resumed.load(str(saved))
    report["loaded"] = digests(resumed) == before
    report["differences"] = resumed.resume_differences()
    train(resumed, range(2, 4))
    report["resumed"] = digests(resumed) == digests(trainer) != before
    other = Trainer(plain, context, str(model))
    try:
        other.load(str(saved))
    except ConfigError as error:
        report["refused"] = str(error)
    report["saved"] = before
    if saved_by_others:
        resumed.load(saved_by_others)
        report["of_others"] = digests(resumed)
    if context.rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:5]), *sys.argv[5:])

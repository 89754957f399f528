"""Run under torchrun by test_lora.py: `lora_ranks.py MODEL DP WRAP OUT.json`.

Trains adapters, and scores a batch with them, with the base alone, and with a frozen model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.model.lora import LoraConfig
from spmd_rl.train.config import FrozenConfig, Fsdp2Config, TrainerConfig
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.trainer import Trainer
from tests.dist.roles_ranks import in_order, own_shard
from tests.dist.train_ranks import context_of


def main(model: str, dp: int, wrap: str, out: Path) -> None:
    torch.set_num_threads(1)
    context = context_of(dp)
    report: dict[str, dict[str, list[str]]] = {}
    for dtype in ("float32", "bfloat16"):
        cfg = TrainerConfig(
            init="random",
            lr=1e-2,
            max_tokens=150,
            dtype=dtype,
            lora=LoraConfig(rank=4),
            backend=Fsdp2Config(wrap=wrap),
        )
        policy = Trainer(cfg, context, model)
        reference = FrozenModel(FrozenConfig.like(cfg), context, model)
        batch = own_shard(context, 5)
        for seed in range(2):
            policy.train_step(own_shard(context, seed), grpo_loss)
        report[dtype] = {
            "before": in_order(context, policy.score(batch)),
            "base": in_order(context, policy.score_base(batch)),
            "after": in_order(context, policy.score(batch)),
            "reference": in_order(context, reference.score(batch)),
        }
    if context.rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))

"""The shipped recipe `grpo` with a gauge of GPU memory after every phase; memory.py reads what it leaves.

spmd-rl run benchmarks.memory_recipe --model FOLDER --data FILE --reward benchmarks.proof_recipe:even
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import spmd_rl as rl
from spmd_rl.recipes.grpo import Config, check

__all__ = ["Config", "check", "main"]
FILE = "memory.json"


@dataclass(frozen=True)
class Reading:
    """One GPU's bytes: all in use, those that torch's allocator does not know of, and the most that it had given out
    since the last reading."""

    used_bytes: int
    outside_bytes: int
    peak_bytes: int


class Gauge(rl.Role):
    """Reads the memory of its rank's GPU, and makes its group's collectives connect."""

    @rl.collective
    def read(self) -> rl.Sharded[list[Reading]]:
        import torch

        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        outside, peak = total - free - torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return [Reading(total - free, outside, peak)]

    @rl.collective
    def rings(self) -> None:
        """What FSDP does to its group."""
        import torch
        import torch.distributed as dist

        group = self.place.mesh.get_group("fsdp")
        one = torch.ones(1 << 20, device=self.place.device)
        many = one.new_empty(one.numel() * self.place.size)
        dist.all_gather_into_tensor(many, one, group=group)
        dist.reduce_scatter_tensor(one, many, group=group)
        dist.all_to_all_single(torch.empty_like(many), many, group=group)
        torch.cuda.synchronize()

    @rl.collective
    def peers(self) -> None:
        """What a push does to its group."""
        import torch
        import torch.distributed as dist

        ours, theirs = (torch.ones(1 << 20, device=self.place.device) for _ in range(2))
        others = [rank for rank in self.place.placement.ranks if rank != self.place.world.rank]
        moves = [dist.P2POp(dist.isend, ours, rank, self.place.group) for rank in others]
        moves += [dist.P2POp(dist.irecv, theirs, rank, self.place.group) for rank in others]
        for work in dist.batch_isend_irecv(moves) if moves else []:
            work.wait()
        torch.cuda.synchronize()


def main(ctl: rl.Controller, cfg: Config) -> None:
    readings: list[tuple[str, list[dict[str, int]]]] = []
    gauge = ctl.spawn(Gauge, cfg, on=ctl.world.split({"gauge": rl.RoleSplit()}).gauge)

    def read(when: str) -> None:
        readings.append((when, [asdict(one) for one in gauge.read.call()]))

    read("joined")
    gauge.rings.call()
    read("rings")
    gauge.peers.call()
    read("peers")
    roles = ctl.world.split(cfg.split)
    trainer = ctl.spawn(rl.Trainer, replace(cfg.trainer, model=cfg.model), on=roles.train)
    rollout = ctl.spawn(rl.Rollout, replace(cfg.engine, model=cfg.model, reward=cfg.reward), on=roles.infer)
    read("spawned")
    weights = ctl.link(trainer, rollout)
    prompts = rl.Prompts(replace(cfg.prompts, path=cfg.data), rl.load_tokenizer(cfg.model))
    for step in ctl.steps(cfg.steps):
        with ctl.phase("sync", awake=[trainer, rollout]):
            weights.push(version=step.index)
            read("sync")
        with ctl.phase("rollout", awake=[rollout]):
            groups = rollout.generate.call(prompts.next(cfg.prompts_per_step), cfg.sampling)
            read("rollout")
        with ctl.phase("train", awake=[trainer]):
            stats = trainer.train_step.call(rl.pack(groups, rl.group_advantage(groups)), rl.grpo_loss)
            read("train")
        step.log(groups, stats)
    (ctl.run_folder / FILE).write_text(json.dumps(readings))

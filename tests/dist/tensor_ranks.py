"""Run under torchrun by test_tensor_shards.py: `tensor_ranks.py DENSE BIASED OUT.json`, on 4 ranks,
where 1, 2 and 4 of them share each matrix, also where two others share the tokens of sequences.
Log-probs are told as bits.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.errors import ConfigError
from spmd_rl.kernels.attention import shared_tokens
from spmd_rl.kernels.linear import shard_exchange
from spmd_rl.kernels.linear.shard_exchange import TorchExchange
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.train.value_trainer import ValueTrainer
from spmd_rl.types.batch import Batch
from tests.dist.checkpoint_ranks import digests, logprobs, step
from tests.dist.sequence_ranks import in_wrong_order, top
from tests.dist.train_case import make_batch
from tests.dist.train_ranks import train_on_all_scores

BOTH = "tp 2, cp 2"
SPLITS = {
    "tp 1": RoleSplit(),
    "tp 2": RoleSplit(tp=2),
    "tp 4": RoleSplit(tp=4),
    "2 copies, tp 2": RoleSplit(dp=2, tp=2),
    BOTH: RoleSplit(tp=2, cp=2),
}
CONFIG = TrainerConfig(init="random", lr=1e-2, eps=1e-4, max_tokens=60)
ROW_SHARDS = 4
# the splits that save, and those that go on
RESUMED = {"tp 1": BOTH, "2 copies, tp 2": "tp 1", BOTH: "tp 4"}
Shares = list[tuple[str, tuple[list[int], list[int]], bytes]]


def gradients(trainer: Trainer, batch: Batch | None = None) -> tuple[dict[str, Tensor], bool]:
    """The whole gradients of a train step that leaves the weights alone, and whether ranks with the
    same box have the same. Each rank is given the `batch`, or its shard of another.
    """
    context = trainer.context
    batch = batch or make_batch(0).shard(context.data_size)[context.data_rank]
    backend = trainer.backend
    shares: Shares = []

    def watched(lr: float, scale: float) -> None:
        for name, one in backend.state()["weights"]:
            box = list(one.box.offset), list(one.box.end)
            if one.local.grad is None and not one.local.requires_grad:
                continue  # no optimizer changes it
            assert one.local.grad is not None
            shares.append((name, box, one.local.grad.cpu().numpy().tobytes()))
        backend.discard()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "step", watched)
        trainer.train_step(batch, grpo_loss)
    by_rank = context.all_gather_bytes(msgspec.msgpack.encode(shares))
    return joined([msgspec.msgpack.decode(blob, type=Shares) for blob in by_rank], backend)


def joined(by_rank: Sequence[Shares], backend: Any) -> tuple[dict[str, Tensor], bool]:
    named = {name for shares in by_rank for name, _, _ in shares}
    whole = {name: torch.full(backend.held[name].spec.shape, torch.nan) for name in sorted(named)}
    seen: dict[tuple[str, str], bytes] = {}
    for shares in by_rank:
        for name, (start, end), values in shares:
            part = whole[name][tuple(map(slice, start, end))]
            part.copy_(torch.frombuffer(bytearray(values), dtype=torch.float32).view(part.shape))
            seen.setdefault((name, str((start, end))), values)
    alike = all(
        seen[name, str(tuple(box))] == values
        for shares in by_rank
        for name, box, values in shares
    )  # fmt: skip
    return whole, alike


def in_a_row(parts: Sequence[Tensor]) -> Tensor:
    """A sum whose tree has another shape."""
    for part in parts[1:]:
        parts[0].add_(part)
    return parts[0]


def exchanged(group: dist.ProcessGroup) -> list[bool]:
    """Whether sums over four ranks, of few rows and of many, are those of numpy in the tree.

    A warning of torch, which every rank of a run would print, is an error.
    """
    exchange, found = TorchExchange(group), []
    for num_rows in (1, 3, 4, 6, 16):
        generator = torch.Generator().manual_seed(num_rows)
        a, b, c, d, bias = torch.randn(5, num_rows, 24, generator=generator).numpy()
        own = torch.from_numpy([a, b, c, d][group.rank()].copy())
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            total = exchange.sum(own, torch.from_numpy(bias[0]), torch.float32)
        found.append(np.array_equal(total.numpy(), ((a + b) + (c + d)) + bias[0]))
    return found


class Runs:
    """Trainers of a model on all ranks, one for each split of them."""

    def __init__(self, folder: Path) -> None:
        self.world = World.from_env()
        join(self.world, open_store(self.world))
        self.meshes = Meshes(self.world)
        self.placements = {
            name: plan_split({"train": one}, 4).train for name, one in SPLITS.items()
        }
        self.meshes.build(list(self.placements.values()))
        self.folder = folder

    def built(
        self, split: str, folder: Path | None = None, row_shards: int = ROW_SHARDS, **settings: Any
    ) -> Trainer:
        context = self.meshes.context(self.placements[split], row_shards)
        return Trainer(replace(CONFIG, **settings), context, str(folder or self.folder))

    def refused(self, split: str) -> str:
        """What a trainer of values says."""
        with pytest.raises(ConfigError) as error:
            ValueTrainer(CONFIG, self.meshes.context(self.placements[split]), str(self.folder))
        return str(error.value)

    def saved(self, split: str, folder: Path) -> tuple[Any, ...]:
        """What a trainer is that has learned once, and saved that."""
        trainer = self.built(split)
        step(trainer, 0)
        trainer.save(str(folder))
        trainer.wait_until_saved()
        return digests(trainer), logprobs(trainer)

    def recomputed(self, split: str) -> dict[str, Any]:
        """What a trainer is that has learned once, for each choice of what is computed again."""
        found = {}
        for recompute in ("none", "cheap", "all"):
            backend = Fsdp2Config(recompute=recompute, wrap="layer")
            trainer = self.built(split, deterministic=True, backend=backend, logit_rows=16)
            step(trainer, 0)
            found[recompute] = digests(trainer)
        return found

    def of_one_token(self, split: str) -> list[Any]:
        """Log-probs of a batch with a single token to score, which one rank of those that share a
        sequence has, and the norm of its gradients.
        """
        trainer, batch = self.built(split), make_batch(5).select(range(4))
        mask = np.zeros_like(batch.mask)
        mask[np.flatnonzero(batch.mask)[0]] = True
        alone, context = replace(batch, mask=mask), trainer.context
        bits, shard = logprobs(trainer, alone), alone.shard(context.data_size)[context.data_rank]
        return [bits, trainer.train_step(shard, grpo_loss)["train/grad_norm"]]

    def resumed(self, split: str, folder: Path) -> tuple[Any, ...]:
        trainer = self.built(split, seed=7)
        trainer.load(str(folder))
        return digests(trainer), logprobs(trainer)


def main(dense: Path, biased: Path, out: Path) -> None:
    torch.set_num_threads(1)
    runs, report = Runs(dense), dict[str, Any]()
    rank, folder = runs.world.rank, out.parent
    names = ("dense", "biased", "top", "alike", "scores", "one token", "recomputed")
    report |= {name: {} for name in (*names, "saved", "resumed", "controls")}
    for split in SPLITS:
        trainer = runs.built(split)
        report["dense"][split] = logprobs(trainer)
        report["top"][split] = top(trainer)
        found, report["alike"][split] = gradients(trainer)
        if rank == 0:
            save_file(found, folder / f"{split}.safetensors")
    group = runs.meshes.context(runs.placements["tp 4"]).axis_group(("tp",))
    report["exchanged"] = exchanged(group)
    report["refused"] = runs.refused("tp 2")
    for split in ("tp 1", "tp 4", BOTH):
        report["biased"][split] = logprobs(runs.built(split, biased, init="folder"))
    for split in ("tp 1", "tp 2", BOTH):
        report["scores"][split] = train_on_all_scores(runs.built(split))
        report["one token"][split] = runs.of_one_token(split)
    for split in ("tp 2", BOTH):
        report["recomputed"][split] = runs.recomputed(split)
    for split, other in RESUMED.items():
        report["saved"][split] = runs.saved(split, folder / split)
        report["resumed"][split] = runs.resumed(other, folder / split)
    runs.built("tp 2").export_hf(str(folder / "hf"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_exchange, "sum_neighbours", in_a_row)
        report["controls"]["in a row"] = logprobs(runs.built("tp 4"))
    report["controls"]["two parts"] = logprobs(runs.built(BOTH, row_shards=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_tokens, "_exchanged", in_wrong_order)
        report["controls"]["tokens in another order"] = logprobs(runs.built(BOTH))
    if rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))

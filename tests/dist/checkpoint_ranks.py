"""Run under torchrun by test_checkpoint.py: `checkpoint_ranks.py MODEL DP OUT.json FOLDER
[resume]`.

Trains two steps and saves to FOLDER; or loads from it and says what it has loaded. Then it trains
one step more.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from tests.dist.train_case import make_batch
from tests.dist.train_ranks import context_of

Shares = dict[str, list[tuple[str, list[int], list[list[int]], bytes]]]


def digests(trainer: Trainer) -> dict[str, str]:
    """The SHA-256 of whole weights and moments, whatever ranks hold of them."""
    shares: Shares = {
        kind: [
            (
                name,
                list(one.shape),
                [list(one.box.offset), list(one.box.extent)],
                one.local.detach().cpu().numpy().tobytes(),
            )
            for name, one in pieces
        ]
        for kind, pieces in trainer.backend.state().items()
    }
    whole: dict[tuple[str, str], np.ndarray] = {}
    for blob in trainer.context.all_gather_bytes(msgspec.msgpack.encode(shares)):
        for kind, pieces in msgspec.msgpack.decode(blob, type=Shares).items():
            for name, shape, (offset, extent), values in pieces:
                tensor = whole.setdefault((kind, name), np.full(shape, np.nan, np.float32))
                block = tuple(
                    slice(start, start + size) for start, size in zip(offset, extent, strict=True)
                )
                tensor[block] = np.frombuffer(values, np.float32).reshape(extent)
    return {
        f"{kind} {name}": hashlib.sha256(one.tobytes()).hexdigest()
        for (kind, name), one in sorted(whole.items())
    }


def logprobs(trainer: Trainer, batch: Batch | None = None) -> list[str]:
    """Of every sequence of a batch that is dealt to the ranks, as bits."""
    context, batch = trainer.context, batch or make_batch(5)
    scores = trainer.score(batch.shard(context.data_size)[context.data_rank])
    rows = np.split(scores.values, np.cumsum(scores.lengths)[:-1])
    mine = {int(index): row.tobytes().hex() for index, row in zip(scores.index, rows, strict=True)}
    found: dict[int, str] = {}
    for blob in context.all_gather_bytes(msgspec.msgpack.encode(mine)):
        found |= msgspec.msgpack.decode(blob, type=dict[int, str])
    return [found[index] for index in sorted(found)]


def step(trainer: Trainer, seed: int) -> None:
    context: RoleContext = trainer.context
    trainer.train_step(make_batch(seed).shard(context.data_size)[context.data_rank], grpo_loss)


def main(model: Path, dp: int, out: Path, folder: Path, resumes: bool) -> None:
    torch.set_num_threads(1)
    cfg = TrainerConfig(init="random", seed=7 if resumes else 0, lr=1e-2, eps=1e-4)
    trainer = Trainer(cfg, context_of(dp), str(model))
    if resumes:
        trainer.load(str(folder))
    else:
        for seed in range(2):
            step(trainer, seed)
        trainer.save(str(folder))
        trainer.wait_until_saved()
    report: dict[str, object] = {"digests": digests(trainer), "logprobs": logprobs(trainer)}
    step(trainer, 2)
    report["after"] = digests(trainer)
    report["resume_differences"] = trainer.resume_differences()
    if trainer.context.rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        Path(sys.argv[3]),
        Path(sys.argv[4]),
        sys.argv[5:] == ["resume"],
    )

"""Run under torchrun by test_megatron.py: `megatron_ranks.py CASE.json OUT.json`.

Builds the trainer of a case on some ranks of the world, takes steps, and writes what must not
depend on the layout. Whole tensors go to a file beside OUT.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from spmd_rl.algo.losses import LossInput, Needs, grpo_loss
from spmd_rl.mesh.role_context import Meshes, RoleContext
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.model.families.rules import Joined, Part, QkvByGroup
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.megatron.backend import Megatron
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.megatron.gather import GatheredTensors
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from spmd_rl.types.token_values import TokenValues
from spmd_rl.weights.local_tensors import LocalTensor
from tests.backends.megatron_case import VOCAB, make_batch

Tensors = dict[str, Tensor]


def run(case: dict[str, Any]) -> tuple[dict[str, Any], Tensors] | None:
    """Return the report and the tensors, on the first rank of the trainer."""
    plant(case.get("bug", ""))
    world = World.from_env()
    join(world, open_store(world))
    placement = plan_split({"train": RoleSplit(**case["split"])}, world.size).train
    meshes = Meshes(world)
    meshes.build([placement])
    if world.rank not in placement.ranks:
        dist.barrier()
        return None
    context = meshes.context(placement, case.get("row_shards", 1))
    backend = MegatronConfig(**case["backend"]) if "backend" in case else Fsdp2Config(wrap="layer")
    trainer = Trainer(TrainerConfig(backend=backend, **case["trainer"]), context, case["model"])
    report: dict[str, Any] = {"scores": [], "steps": []}
    tensors: Tensors = {}
    if "load" in case:
        report["version"] = trainer.load(case["load"])
        report["differences"] = trainer.resume_differences()
    keep(tensors, "start", trainer)
    if isinstance(trainer.backend, Megatron):
        check_source(trainer.backend, tensors)
        keep_gradients(tensors, trainer.backend, context)
    for seed in case["seeds"]:
        take_step(case, seed, trainer, report)
    keep(tensors, "weights", trainer)
    if "save" in case:
        trainer.save(case["save"])
        trainer.wait_until_saved()
    if "export" in case:
        trainer.export_hf(case["export"])
    dist.barrier()
    return (report, tensors) if context.rank == 0 else None


def plant(bug: str) -> None:
    """Make a parameter of Megatron-core of other rows than it should be, in the same way for all.

    What is read by such a rule is written by it too, so that only the model's outputs are wrong.
    """
    of_tensors, of_attention = Joined.parts, QkvByGroup.parts
    if bug in ("gate and up", "queries and keys"):
        num_joined = 2 if bug == "gate and up" else 3
        Joined.parts = lambda rule, *args: of_tensors(  # type: ignore[method-assign]
            _with_first_two_swapped(rule, num_joined), *args
        )
    if bug == "queries and keys by group":
        QkvByGroup.parts = lambda rule, *args: of_attention(  # type: ignore[method-assign]
            replace(rule, query=rule.key, key=rule.query), *args
        )
    if bug == "groups of keys":
        QkvByGroup.parts = lambda rule, *args: _with_other_keys(  # type: ignore[method-assign]
            rule, of_attention(rule, *args)
        )


def _with_first_two_swapped(rule: Joined, num_joined: int) -> Joined:
    """Return the rule with its first two tensors swapped, if it joins so many."""
    names = rule.names
    return Joined(names[1], names[0], *names[2:]) if len(names) == num_joined else rule


def _with_other_keys(rule: QkvByGroup, parts: Iterator[Part]) -> list[Part]:
    """Give each group of queries the key of another group."""
    found = list(parts)
    keys = [part for part in found if part.name == rule.key]
    boxes = {part.rows: other.box for part, other in zip(keys, reversed(keys), strict=True)}
    return [replace(one, box=boxes.get(one.rows, one.box)) for one in found]


def take_step(case: dict[str, Any], seed: int, trainer: Trainer, report: dict[str, Any]) -> None:
    context = trainer.context
    batch = make_batch(seed)
    if case.get("all_scores"):
        ids = np.random.default_rng(0).integers(0, VOCAB, (batch.num_tokens, 3), dtype=np.int32)
        batch = batch.with_columns(candidates=np.where(batch.mask[:, None], ids, np.int32(0)))
    shard = shard_of(batch, context)
    report["scores"].append(whole_scores(trainer.score(shard), context))
    if case.get("all_scores"):
        needs = Needs(entropy=True, candidates=True)
        report["steps"].append(trainer.train_step(shard, all_scores_loss, needs=needs))
    else:
        report["steps"].append(trainer.train_step(shard, grpo_loss))


def shard_of(batch: Batch, context: RoleContext) -> Batch:
    return batch.shard(context.data_size)[context.data_rank]


def all_scores_loss(out: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that learns from log-probs, entropy and candidates."""
    assert out.candidate_logprobs is not None
    loss = -out.advantages * out.logprobs - out.entropy - out.candidate_logprobs.mean(1)
    return loss, {"test/entropy": out.entropy}


def keep(tensors: Tensors, kind: str, trainer: Trainer) -> None:
    for name in trainer.backend.names():
        tensors[f"{kind}/{name}"] = trainer.backend.gather(name).clone()


def keep_gradients(tensors: Tensors, backend: Megatron, context: RoleContext) -> None:
    """Have the next optimizer step keep the whole gradients that it is taken on."""
    gathered = GatheredTensors(context, backend.device)
    original = backend.step

    def step(lr: float, grad_scale: float) -> None:
        own = list(gradients(backend))
        for name in backend.names():
            tensors[f"gradients/{name}"] = gathered.whole(name, own)
        original(lr, grad_scale)

    backend.step = step  # type: ignore[method-assign]


def gradients(backend: Megatron) -> Iterator[tuple[str, LocalTensor]]:
    for parameter in backend._parameters:
        if (held := backend._optimizer.master(parameter)) is not None:
            master, start = held
            yield from parameter.named(master.grad, start)


def check_source(backend: Megatron, tensors: Tensors) -> None:
    """Every box of the source of a push holds what the whole tensor has there."""
    source = backend.source(lambda: None)
    pieces = source.layout(0).pieces
    for piece in pieces:
        memory = source.view(piece.name, piece.box)
        whole = tensors[f"start/{piece.name}"][tuple(map(slice, piece.box.offset, piece.box.end))]
        assert memory is not None and torch.equal(memory.float(), whole.to(memory.dtype).float())


def whole_scores(values: TokenValues, context: RoleContext) -> list[float]:
    """The log-probs of the whole batch. All ranks of a shard must have the same."""
    rows, at = {}, 0
    for index, length in zip(values.index.tolist(), values.lengths.tolist(), strict=True):
        rows[index] = values.values[at : at + length].tolist()
        at += length
    merged: dict[str, list[float]] = {}
    for blob in context.all_gather_bytes(json.dumps(rows).encode()):
        for index, own in json.loads(blob).items():
            assert merged.setdefault(index, own) == own
    return [value for index in sorted(merged, key=int) for value in merged[index]]


def main() -> None:
    torch.set_num_threads(1)
    found = run(json.loads(Path(sys.argv[1]).read_text()))
    if found is not None:
        report, tensors = found
        path = Path(sys.argv[2])
        save_file(
            {name: one.detach().clone() for name, one in tensors.items()},
            path.with_suffix(".safetensors"),
        )
        path.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

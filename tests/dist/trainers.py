"""What tests ask of trainers on the ranks of a world: their bits, whatever rank holds which."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from spmd_rl.algo.losses import LossInput, Needs, grpo_loss
from spmd_rl.mesh.role_context import Meshes, RoleContext
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from spmd_rl.types.token_values import TokenValues
from tests.dist.train_case import VOCAB, make_batch

States = dict[str, list[tuple[str, list[int], list[list[int]], bytes]]]
Shares = list[tuple[str, tuple[list[int], list[int]], bytes]]
SCORED = ("train/loss", "train/grad_norm", "train/entropy")  # metrics of a step


class Splits:
    """A role that the ranks of a world share in several ways, each with a name."""

    def __init__(self, world: World, splits: Mapping[str, RoleSplit]) -> None:
        self.world = world
        self._meshes = Meshes(world)
        self._placements = {
            name: plan_split({"train": split}, world.size).train for name, split in splits.items()
        }
        self._meshes.build(list(self._placements.values()))

    def context(self, name: str, row_shards: int = 1) -> RoleContext:
        return self._meshes.context(self._placements[name], row_shards)

    def has_part(self, name: str) -> bool:
        """Whether this rank is one of the role's."""
        return self.world.rank in self._placements[name].ranks

    def each(self, act: Callable[[str], Any], names: Iterable[str] = ()) -> dict[str, Any]:
        """Return what `act` returns on the ranks of each split, one split after the other."""
        found = {}
        for name in names or self._placements:
            if self.has_part(name):
                found[name] = act(name)
            dist.barrier()
        return found


def context_of(dp: int) -> RoleContext:
    """Join the world, and return the role of all its ranks."""
    world = World.from_env()
    join(world, open_store(world))
    return Splits(world, {"all": RoleSplit(dp=dp)}).context("all")


def own_group(ep: int, world: World) -> dist.ProcessGroup:
    """Make all groups of `ep` neighbours, and return this rank's."""
    groups = [dist.new_group(list(range(first, first + ep))) for first in range(0, world.size, ep)]
    return groups[world.rank // ep]


def gathered(value: object) -> list[Any]:
    """Return the value of each rank of the world."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def own_shard(context: RoleContext, batch: Batch) -> Batch:
    return batch.shard(context.data_size)[context.data_rank]


def train(trainer: Trainer, seeds: Iterable[int]) -> list[dict[str, float]]:
    """Take a step on the batch of each seed, and return their metrics."""
    context = trainer.context
    return [trainer.train_step(own_shard(context, make_batch(one)), grpo_loss) for one in seeds]


def weights(trainer: Trainer) -> dict[str, list[float]]:
    backend = trainer.backend
    return {name: backend.gather(name).flatten().tolist() for name in backend.names()}


def digests(trainer: Trainer) -> dict[str, str]:
    """The SHA-256 of whole weights and moments, whatever ranks hold of them."""
    shares: States = {
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
        for kind, pieces in msgspec.msgpack.decode(blob, type=States).items():
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


def in_order(context: RoleContext, scores: TokenValues) -> list[str]:
    """The bits of every sequence of a batch, whichever rank had it."""
    ends = np.cumsum(scores.lengths)
    own = {
        int(index): scores.values[end - length : end].tobytes().hex()
        for index, length, end in zip(scores.index, scores.lengths, ends, strict=True)
    }
    found: dict[int, str] = {}
    for blob in context.all_gather_bytes(msgspec.msgpack.encode(own)):
        found |= msgspec.msgpack.decode(blob, type=dict[int, str])
    return [found[index] for index in sorted(found)]


def logprobs(trainer: Trainer, batch: Batch | None = None) -> list[str]:
    """Of every sequence of a batch that is dealt to the ranks, as bits."""
    context = trainer.context
    return in_order(context, trainer.score(own_shard(context, batch or make_batch(5))))


def top(trainer: Trainer) -> list[Any]:
    """The likeliest tokens of a batch that all ranks have, whatever shards there are."""
    found = trainer.top_logprobs(make_batch(5), 3)
    return [found.ids.values.tolist(), found.logprobs.values.tobytes().hex()]


def gradients(trainer: Any, batch: Batch | None = None) -> tuple[dict[str, Tensor], bool]:
    """The whole gradients of a train step that leaves the weights alone, and whether ranks with the
    same box have the same. Each rank is given the `batch`, or its shard of another.
    """
    context, backend = trainer.context, trainer.backend
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
        trainer.train_step(batch or own_shard(context, make_batch(0)), grpo_loss)
    by_rank = context.all_gather_bytes(msgspec.msgpack.encode(shares))
    return _joined([msgspec.msgpack.decode(blob, type=Shares) for blob in by_rank], backend)


def _joined(by_rank: Sequence[Shares], backend: Any) -> tuple[dict[str, Tensor], bool]:
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


def all_scores_loss(out: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss that learns from log-probs, entropy and candidates."""
    assert out.candidate_logprobs is not None
    return -out.advantages * out.logprobs - out.entropy - out.candidate_logprobs.mean(1), {}


def train_on_all_scores(trainer: Trainer) -> list[dict[str, float]]:
    """Return the metrics of a step on a whole batch, and of one on two sequences."""
    whole = make_batch()
    shape = whole.num_tokens, 3
    ids = np.random.default_rng(0).integers(0, VOCAB, shape, dtype=np.int32)
    whole = whole.with_columns(candidates=np.where(whole.mask[:, None], ids, np.int32(0)))
    needs = Needs(entropy=True, candidates=True)
    shards = [own_shard(trainer.context, batch) for batch in (whole, whole.select([0, 1]))]
    return [trainer.train_step(shard, all_scores_loss, needs=needs) for shard in shards]


def check_gradients(folder: Path, gradients: Path) -> None:
    """Compare gradients of a train step's loss with those of transformers in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    batch, logprobs = make_batch(0), []
    starts = np.cumsum(batch.lengths) - batch.lengths
    temperature = torch.from_numpy(np.where(batch.temperature == 0, 1, batch.temperature))
    for start, length, one in zip(starts, batch.lengths, temperature.double(), strict=True):
        tokens = torch.from_numpy(batch.tokens[start : start + length]).long()
        rows = (model(tokens[None]).logits[0] / one).log_softmax(-1)
        logprobs += [rows.new_zeros(1), rows[:-1].gather(1, tokens[1:, None])[:, 0]]
    weight = torch.from_numpy(batch.weight * batch.advantages * batch.mask).double()
    loss = -(weight * torch.cat(logprobs)).sum() / batch.denominator
    loss.backward()
    found = load_file(gradients)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (found[name].double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < 2e-5, name


def check_scores(
    alone: Sequence[Mapping[str, float]], shared: Sequence[Mapping[str, float]], rel: float = 2e-5
) -> None:
    """Check the metrics of steps whose loss has entropies and candidates."""
    for step, other in zip(alone, shared, strict=True):
        for name in SCORED:
            assert other[name] == pytest.approx(step[name], rel=rel), name
        assert other["onpolicy/compared_tokens"] == step["onpolicy/compared_tokens"]
        assert other["train/tokens"] == step["train/tokens"]

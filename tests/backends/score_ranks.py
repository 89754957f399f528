"""Run under torchrun by test_megatron_bits.py: `score_ranks.py CASES.json OUT.json`.

Scores one batch with the trainer of each case, one after the other, and writes the log-probs and
the numeric contract of each. Every rank of the world is the trainer's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels import PackedAttention, Scores, linear, token_scores
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.megatron import attention
from spmd_rl.train.megatron.attention import AttentionInputs
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.megatron.linear import LocalActivation, LocalLinear
from spmd_rl.train.megatron.packing import held_positions
from spmd_rl.train.megatron.scores import VocabularyHead
from spmd_rl.train.trainer import Trainer
from tests.backends.megatron_ranks import shard_of, whole_scores
from tests.dist.train_case import make_batch


def library_silu(self: LocalActivation, gate_up: Tensor) -> Tensor:
    """Megatron-core's own activation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def half_products(self: LocalLinear, x: Tensor) -> tuple[Tensor, None]:
    """Products whose K is cut in two, as that of two ranks along tp is."""
    halves = zip(x.flatten(0, 1).chunk(2, 1), self.weight.chunk(2, 1), strict=True)
    out = sum(linear(part, weight) for part, weight in halves)
    return (out if self.bias is None else out + self.bias).view(*x.shape[:-1], -1), None


def attend_to_whole(query: Tensor, key: Tensor, value: Tensor, inputs: AttentionInputs) -> Tensor:
    """The contract's attention under context parallelism: of all queries, on every rank."""
    order = attention._whole_order(inputs, query.device)
    whole = [gathered(x, 0, inputs.context_group)[order] for x in (query, key, value)]
    attend = PackedAttention(inputs.lengths, device=query.device)
    held = [held_positions(int(length), inputs.context) for length in inputs.lengths]
    bases = np.cumsum(inputs.lengths) - inputs.lengths
    own = np.concatenate([one + base for one, base in zip(held, bases, strict=True)])
    return attend(0, *whole)[torch.from_numpy(own)]


def whole_product(self: Any, x: Tensor) -> tuple[Tensor, None]:
    """The contract's product of a layer whose K is cut along tp."""
    weight, rows = gathered(self.weight, 1, self.tp_group), gathered(x, -1, self.tp_group)
    return linear(rows.flatten(0, 1), weight).view(*x.shape[:-1], -1), None


def whole_vocabulary(self: VocabularyHead, logits: Tensor, *rest: Any) -> Scores:
    """The contract's log-probs, of logits that are cut along tp."""
    return token_scores(gathered(logits, 1, self.group), *rest)


def gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def plants(name: str | None) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Owner, name and stand-in of what takes other arithmetic: wrong, or right where it is cut."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    return {
        None: [],
        "library SiLU": [(LocalActivation, "forward", library_silu)],
        "K in halves": [(LocalLinear, "forward", half_products)],
        "whole attention": [(attention, "_attend_across_ranks", attend_to_whole)],
        "whole products": [(RowParallelLinear, "forward", whole_product)],
        "whole products and vocabulary": [
            (RowParallelLinear, "forward", whole_product),
            (VocabularyHead, "_score_shared", whole_vocabulary),
        ],
    }[name]


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Let the forward pass take other arithmetic."""
    with ExitStack() as stack:
        for owner, attribute, stand_in in plants(name):
            stack.callback(setattr, owner, attribute, getattr(owner, attribute))
            setattr(owner, attribute, stand_in)
        yield


def score(case: dict[str, Any], sizes: dict[str, int], meshes: Meshes) -> dict[str, Any]:
    placement = plan_split({"train": RoleSplit(**case["split"])}, meshes.world.size).train
    meshes.build([placement])
    context = meshes.context(placement)
    backend = Fsdp2Config() if case["backend"] is None else MegatronConfig(**case["backend"])
    trainer = Trainer(TrainerConfig(backend=backend, **case["trainer"]), context, case["model"])
    with planted(case["plant"]):
        scores = trainer.score(shard_of(make_batch(**sizes), context))
    return {"scores": whole_scores(scores, context), "contract": trainer.numeric_contract()}


def main() -> None:
    torch.set_num_threads(1)
    asked = json.loads(Path(sys.argv[1]).read_text())
    world = World.from_env()
    join(world, open_store(world))
    meshes = Meshes(world)
    found = {name: score(case, asked["batch"], meshes) for name, case in asked["cases"].items()}
    if world.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

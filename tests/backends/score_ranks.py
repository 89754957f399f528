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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels import linear
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.megatron.linear import LocalActivation, LocalLinear
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


def plants(name: str | None) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Owner, name and stand-in of what takes other arithmetic: wrong, or right where it is cut."""
    return {
        None: [],
        "library SiLU": [(LocalActivation, "forward", library_silu)],
        "K in halves": [(LocalLinear, "forward", half_products)],
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
    context = meshes.context(placement, case["row_shards"])
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

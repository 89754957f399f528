"""Memory of a trainer whose adapters alone learn, on one of its ranks. Pure, no torch.

Units: bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from spmd_rl.model.lora import B, LoraConfig
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.optimizer.parameter_groups import FP32_BYTES, moment_bytes, update_rules


@dataclass(frozen=True)
class AdapterSizes:
    """What there is of each class. The base is in the compute dtype, and is never gathered where
    there is one shard.
    """

    base: int
    master: int
    moments: int
    grads: int
    gathered: int


def num_adapted(spec: ModelSpec, lora: LoraConfig) -> int:
    """Return the number of parameters of all adapters."""
    return sum(prod(shape) for shape in lora.shapes(spec).values())


def adapter_sizes(
    spec: ModelSpec, cfg: TrainerConfig, num_shards: int, element_bytes: int, num_gathered: int
) -> AdapterSizes:
    """Return the sizes on the rank that holds most.

    `element_bytes` is the size of a number in the compute dtype, and `num_gathered` the number of
    base parameters that shards gather at once.
    """
    shapes, adapted = cfg.lora.shapes(spec), num_adapted(spec, cfg.lora)
    shard = -(-adapted // num_shards) * FP32_BYTES
    of_base = num_gathered if num_shards > 1 else 0
    is_copied = num_shards > 1 or element_bytes != FP32_BYTES
    return AdapterSizes(
        base=-(-spec.num_parameters // num_shards) * element_bytes,
        master=shard,
        moments=moment_bytes(shapes, update_rules(shapes, cfg, num_shards), num_shards),
        grads=shard,
        gathered=(of_base + adapted) * element_bytes if is_copied else 0,
    )


def merge_bytes(spec: ModelSpec, lora: LoraConfig, num_shards: int) -> int:
    """Return what a merged push takes: all of A where shards gather it, and one merged weight."""
    weights = spec.parameter_shapes()
    gathered = largest = 0
    for name, shape in lora.shapes(spec).items():
        if name.endswith(f".{B}.weight"):
            whole = weights[f"{name.removesuffix(f'.{B}.weight')}.weight"]
            largest = max(largest, -(-prod(whole) // num_shards))
        elif num_shards > 1:
            gathered += prod(shape)
    return (gathered + largest) * FP32_BYTES

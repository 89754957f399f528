"""Parts of a model that a trainer of FSDP2 shards alike: how much there is, and what learns. Pure.

Along tp a rank has a part of each matrix; the first rank has no less than the others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from spmd_rl.model.held.held import TRAINER, parts
from spmd_rl.model.held.tensor import Along
from spmd_rl.model.layers.layer import Dims, num_elements
from spmd_rl.model.lora import B, LoraConfig
from spmd_rl.model.parts.part import ModelPart
from spmd_rl.model.spec import Head, ModelSpec
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.optimizer.parameter_groups import FP32_BYTES, moment_bytes, update_rules


@dataclass(frozen=True)
class PartSize:
    """Elements of the largest layer, of all, of those outside of layers, and of those that learn.

    `num_shards` ranks share them, and `moments` are the bytes of the optimizer's state of one.
    """

    layer: int = 0
    all: int = 0
    outside: int = 0
    trained: int = 0
    moments: int = 0
    num_shards: int = 1

    @property
    def shard(self) -> int:
        return -(-self.all // self.num_shards)

    @property
    def trained_shard(self) -> int:
        return -(-self.trained // self.num_shards)

    def gathered(self, is_whole: bool, num_layers: int) -> int:
        """Return what is gathered at once: all, or two neighbouring layers and what is outside."""
        return self.all if is_whole else min(num_layers, 2) * self.layer + self.outside


def of_layers(spec: ModelSpec, head: Head, tp: int = 1, experts: bool | None = None) -> PartSize:
    """Return the elements of a rank: all, or those of experts, or those of the rest."""
    layers = Counter(ModelPart(0, tp).spec(spec).blocks)
    sizes = {
        block: num_elements(
            [one for one in block.parameters() if experts in (None, one.expert is not None)]
        )
        for block in layers
    }
    outside = 0
    if not experts:
        boxes = parts(spec, Along(0, tp), TRAINER, head) if tp > 1 else {}
        outer = spec.outer_parameters(head)
        outside = sum((boxes[one.name] if tp > 1 else one).num_elements for one in outer)
    in_layers = sum(sizes[block] * count for block, count in layers.items())
    return PartSize(max(sizes.values()), in_layers + outside, outside)


def own_shapes(spec: ModelSpec, head: Head, tp: int) -> dict[str, Dims]:
    """Return the shape of every parameter of a rank that an optimizer may change, by name."""
    shapes = spec.trainable_shapes(head)
    if tp == 1:
        return shapes
    boxes = parts(spec, Along(0, tp), TRAINER, head)
    return {name: boxes[name].extent for name in shapes}


def both_parts(spec: ModelSpec, head: Head, tp: int, shared: bool) -> list[PartSize]:
    """Return all but experts that are `shared`, and these."""
    if shared:
        return [of_layers(spec, head, tp, experts) for experts in (False, True)]
    return [of_layers(spec, head, tp), PartSize()]


@lru_cache(maxsize=64)  # a plan asks again for each layout
def sharded_parts(
    spec: ModelSpec,
    cfg: TrainerConfig,
    head: Head,
    tp: int,
    num_shards: tuple[int, int],
    shared: bool,
) -> tuple[PartSize, PartSize]:
    """Return all but the experts that ranks share, and these; or the adapters, which learn alone.

    `num_shards` are those of each. `cfg` says what learns, and by which optimizer.
    """
    shapes = cfg.lora.shapes(spec) if cfg.lora.rank else own_shapes(spec, head, tp)
    rules = update_rules(shapes, cfg, num_shards[0])
    of_experts = spec.expert_parts(1) if shared else {}
    if cfg.lora.rank:
        adapted = num_adapted(spec, cfg.lora)
        sizes = [PartSize(-(-adapted // spec.num_layers), adapted), PartSize()]
    else:
        sizes = both_parts(spec, head, tp, shared)
    others, experts = (
        replace(
            part,
            trained=sum(prod(shapes[name]) for name in learned),
            moments=moment_bytes(shapes, learned, count),
            num_shards=count,
        )
        for part, count, learned in zip(
            sizes,
            num_shards,
            (
                {name: rule for name, rule in rules.items() if (name in of_experts) == is_expert}
                for is_expert in (False, True)
            ),
            strict=True,
        )
    )
    return others, experts


def num_adapted(spec: ModelSpec, lora: LoraConfig) -> int:
    """Return the number of parameters of all adapters."""
    return sum(map(prod, lora.shapes(spec).values()))


def num_trained_parameters(spec: ModelSpec, cfg: TrainerConfig) -> int:
    """Return how many parameters learn: those of the adapters, or those that are not frozen."""
    return sharded_parts(spec, cfg, "lm", 1, (1, 1), False)[0].trained


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

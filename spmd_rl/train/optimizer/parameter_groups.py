"""Parameter groups: which parameters are trained, by which optimizer, and at which rate. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache, partial
from math import prod

from spmd_rl.errors import ConfigError
from spmd_rl.model.spec import EMBEDDING, HEAD
from spmd_rl.train.config import OptimizerKind, ParameterGroup, TrainerConfig
from spmd_rl.weights.plan.layout import ITEM_BYTES, Dims, chunk_box

FP32_BYTES = ITEM_BYTES["float32"]  # of master weights, gradients and moments
BLOCK_ELEMENTS = 256  # of a moment in 8 bits, which have one scale
LEAST_8BIT_ELEMENTS = 4096  # a smaller shard keeps its moments in 32 bits


@dataclass(frozen=True)
class UpdateRule:
    """How the optimizer updates a parameter. Its rate is `lr_scale` times the schedule's."""

    algorithm: OptimizerKind
    lr_scale: float
    weight_decay: float


def update_rules(
    shapes: Mapping[str, Dims], cfg: TrainerConfig, num_shards: int
) -> dict[str, UpdateRule]:
    """Return the rule of each parameter that is trained; frozen ones are left out.

    Raises: ConfigError for a pattern that matches no parameter, or if all parameters are frozen.
    """
    patterns = {"freeze": cfg.freeze, "groups": [group.pattern for group in cfg.groups]}
    for key, of_key in patterns.items():
        _require_matches(f"trainer.{key}", of_key, shapes)
    trained = {
        name: shape
        for name, shape in shapes.items()
        if not (cfg.freeze and _matches(name, cfg.freeze))
    }
    if not trained:
        raise ConfigError("trainer.freeze matches every parameter: leave one to train")
    rule = cache(partial(_rule, cfg, num_shards))
    return {
        name: rule(shape, name.startswith("model.layers."), _group(name, cfg.groups))
        for name, shape in trained.items()
    }


def matrix_order(shapes: Mapping[str, Dims]) -> list[str]:
    """Return names by falling size: the shards' ranks own these matrices in rotation."""
    return sorted(shapes, key=lambda name: -prod(shapes[name]))


def moment_bytes(
    shapes: Mapping[str, Dims], rules: Mapping[str, UpdateRule], num_shards: int
) -> int:
    """Return the bytes of the optimizer's state on the rank that holds most."""
    elements = {"adamw": 0, "adamw8bit": 0}
    for name, rule in rules.items():
        if rule.algorithm != "muon":
            elements[rule.algorithm] += prod(shapes[name])
    num_fp32, num_8bit = (-(-number // num_shards) for number in elements.values())
    matrices = {name: shapes[name] for name, rule in rules.items() if rule.algorithm == "muon"}
    owned = sum(prod(shapes[name]) for name in matrix_order(matrices)[::num_shards])
    scales = -(-num_8bit // BLOCK_ELEMENTS)
    return (2 * num_fp32 + owned + 2 * scales) * FP32_BYTES + 2 * num_8bit


def _group(name: str, groups: tuple[ParameterGroup, ...]) -> ParameterGroup | None:
    """Return the first group whose pattern matches a parameter's name."""
    for group in groups:
        if fnmatchcase(name, group.pattern):
            return group
    return None


def _rule(
    cfg: TrainerConfig, num_shards: int, shape: Dims, in_block: bool, group: ParameterGroup | None
) -> UpdateRule:
    """Return the rule of the parameters of one shape and group, in the blocks or beside them."""
    kind = cfg.optimizer.kind
    algorithm: OptimizerKind = "adamw"
    if kind == "muon" and len(shape) == 2 and in_block:
        algorithm = "muon"
    elif kind == "adamw8bit" and _fits_blocks(shape, num_shards):
        algorithm = "adamw8bit"
    decay = cfg.weight_decay if len(shape) > 1 else 0.0
    if group is None:
        return UpdateRule(algorithm, 1.0, decay)
    own_decay = decay if group.weight_decay is None else group.weight_decay
    return UpdateRule(algorithm, group.lr_scale, own_decay)


def _fits_blocks(shape: Dims, num_shards: int) -> bool:
    """Return whether a tensor is a matrix whose shards are large enough and of whole blocks.

    Blocks then lie alike for any number of shards, and so does a checkpoint. Vectors are left out,
    because they are small, and more ranks would soon make their shards too small.
    """
    if len(shape) < 2:
        return False
    sizes = {chunk_box(shape, shard, num_shards).num_elements for shard in range(num_shards)}
    return all(
        size >= LEAST_8BIT_ELEMENTS and size % BLOCK_ELEMENTS == 0 for size in sizes if size > 0
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _require_matches(key: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise a ConfigError that names the nearest parameter, for a pattern that matches none."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            nearest = f"the nearest is '{get_close_matches(pattern, names, n=1, cutoff=0.0)[0]}'"
            if fnmatchcase(HEAD, pattern):
                nearest = f"the head of this model is tied to '{EMBEDDING}'"
            raise ConfigError(f"{key}: no parameter's name matches '{pattern}'; {nearest}")

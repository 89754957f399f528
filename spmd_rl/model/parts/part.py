"""Part of a model that one rank has, where several ranks share the model. No torch.

Ranks share heads by groups of queries with a key, hidden units of MLPs, and the rows of the head of
the vocabulary. Each has the norms whole, and in an engine the embedding. Each expert of a mixture
is whole on the ranks that have it, and computes some rows of the tokens that all ranks have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from spmd_rl.errors import ConfigError
from spmd_rl.model.held.held import ENGINE, TRAINER, VOCAB_SHARDS, parts
from spmd_rl.model.held.tensor import Along
from spmd_rl.model.spec import ModelSpec
from spmd_rl.weights.plan.layout import Box

if TYPE_CHECKING:
    from torch import Tensor

    from spmd_rl.kernels.linear.shard_exchange import RowExchange, ShardExchange, TorchExchange

ROW_SHARDS = (1, 2, 4, 8)  # numbers of ranks that may share a model with equal bits


@dataclass(frozen=True)
class ModelPart:
    """Part `index` of `count`; the ranks that have the others are behind `exchange`.

    With `trains`, it is a trainer's: ranks share the rows of the embedding as those of the head,
    and between layers the rows of tokens.
    """

    index: int = 0
    count: int = 1
    exchange: ShardExchange | None = None
    trains: bool = False

    @property
    def rows(self) -> RowExchange | None:
        """The exchange of a trainer's ranks."""
        return cast("RowExchange | None", self.exchange) if self.trains else None

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """Return the model with the layers of this part, which all parts have alike."""
        if self.count == 1:
            return spec
        own = {block: block.part(self.count) for block in spec.distinct_blocks()}
        return replace(spec, blocks=tuple(own[block] for block in spec.blocks))

    def boxes(self, spec: ModelSpec) -> Mapping[str, Box]:
        """Return the box of each parameter that this part has."""
        return parts(spec, Along(self.index, self.count), TRAINER if self.trains else ENGINE)

    def embedded(self, spec: ModelSpec) -> tuple[int, int]:
        """Return the range of the vocabulary's rows in the embedding of this part."""
        return self.vocabulary(spec) if self.trains else (0, spec.vocab_size)

    def own_rows(self, num_rows: int) -> slice:
        """Return the rows of all tokens for which this part has experts compute."""
        size = -(-num_rows // self.count)
        return slice(min(self.index * size, num_rows), min((self.index + 1) * size, num_rows))

    def joined_rows(self, own: Tensor, num_rows: int) -> Tensor:
        """Return all rows, of which the ranks of an engine have their `own_rows`.

        Ranks: all that share the model. Blocks: until each has called.
        """
        return cast("TorchExchange", self.exchange).joined(own, num_rows)

    def vocabulary(self, spec: ModelSpec) -> tuple[int, int]:
        """Return the range of the vocabulary's rows in the head of this part."""
        rows = vocab_part_rows(spec, self.count)
        return self.index * rows, min((self.index + 1) * rows, spec.vocab_size)


WHOLE = ModelPart()


def most_row_shards(*sizes: int) -> int:
    """Return the `row_shards` of a run in which so many ranks share a model, in one role each.

    It is the largest size whose sums can have equal bits.
    """
    return max(size for size in (1, *sizes) if size in ROW_SHARDS)


def num_own_parts(spec: ModelSpec, tp: int = 1) -> int:
    """Return in how many fp32 parts one of `tp` ranks has a row-parallel sum; 0 without parts."""
    return spec.row_shards // tp if spec.row_shards > 1 else 0


def row_shards_of_run(settings: Mapping[str, Any]) -> int:
    """Return the `row_shards` of a run's models, from its settings as plain data."""
    if asked := settings.get("run", {}).get("row_shards", 0):
        return int(asked)
    split = settings.get("split", {})
    is_native = settings.get("engine", {}).get("kind", "native") == "native"
    # FSDP2's layers are ours, and Megatron-core's may be those of transformer-engine
    is_local = settings.get("trainer", {}).get("backend", {}).get("layers", "local") == "local"
    sharing = {"infer": is_native, "train": is_local}
    sizes = [split.get(role, {}).get("tp", 1) for role, sums in sharing.items() if sums]
    return most_row_shards(*sizes)


def vocab_part_rows(spec: ModelSpec, num_parts: int) -> int:
    """Return how many rows of the vocabulary each of `num_parts` has; the last may have fewer."""
    return -(-spec.vocab_size // VOCAB_SHARDS) * VOCAB_SHARDS // num_parts


def check_parts(spec: ModelSpec, count: int, at: str) -> None:
    """Raise a ConfigError that begins with `at` unless `count` ranks of an engine can share a model
    with equal bits.
    """
    if count == 1:
        return
    if count not in ROW_SHARDS:
        raise ConfigError(f"{at}: sums have equal bits over 2, 4 or 8 ranks alone")
    for tensor in spec.distinct_tensors():
        cut = tensor.tp_cut
        if cut is None:
            continue
        cut.check(count, at)
        if (size := tensor.shape[cut.dim]) % count:
            raise ConfigError(f"{at} does not divide the {size} of {tensor.name}")
    for block in spec.distinct_blocks():
        block.part(count)  # some layers cannot be shared
    if (count - 1) * vocab_part_rows(spec, count) >= spec.vocab_size:
        raise ConfigError(f"{at} leaves ranks without one of the {spec.vocab_size} tokens")

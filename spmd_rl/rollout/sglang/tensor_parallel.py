"""Tensor parallelism of SGLang: which ranks share an engine, and the part of each tensor of each.

Every rank of the group starts the scheduler of its own GPU. Only the first rank talks to its
scheduler, and SGLang passes requests and calls on to the others. Experts are not split: each rank
has a block of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.model.held.held import Holder, parts
from spmd_rl.model.held.tensor import Along
from spmd_rl.model.layers.expert_shares import check_shares
from spmd_rl.model.spec import ModelSpec
from spmd_rl.weights.plan.layout import Box

# rows of SGLang's embeddings are padded to a multiple of this before they are split
# Source: DEFAULT_VOCAB_PADDING_SIZE in sglang 0.5.16, layers/vocab_parallel_embedding.py
VOCAB_PADDING = 64
SGLANG = Holder(padding=VOCAB_PADDING, experts_by_tp=True)


class Greeting(msgspec.Struct, frozen=True):
    """What the ranks of a group tell each other before their schedulers start.

    `folder` is the private one of the rank's sockets. `fraction` is the share of the free GPU
    memory that the rank can give to weights, keys and values; None on a CPU.
    """

    node: int
    folder: str
    fraction: float | None


class RankChild(msgspec.Struct, frozen=True):
    """The process that a rank of the world has started for its scheduler."""

    rank: int
    pid: int


@dataclass(frozen=True)
class TensorParallel:
    """The group of ranks that share one engine, as this rank sees it.

    `exchange` returns the bytes that each rank of the group gives, in their order. All ranks of the
    group call it together, and it waits for each.
    """

    rank: int = 0
    size: int = 1
    node: int = 0
    exchange: Callable[[bytes], list[bytes]] = lambda blob: [blob]

    def exchange_children(self, rank: int, pid: int) -> list[RankChild]:
        """Return the children of the other ranks of the group."""
        mine = msgspec.msgpack.encode(RankChild(rank, pid))
        all_ranks = [msgspec.msgpack.decode(one, type=RankChild) for one in self.exchange(mine)]
        return [one for one in all_ranks if one.pid != pid]

    def greet(self, folder: Path, fraction: float | None) -> tuple[Path, float | None]:
        """Return the folder of the first rank, and the least fraction of all ranks.

        The schedulers must have equally many keys and values, because they take the same steps.
        Raises: PlanError when the ranks are on several hosts.
        """
        mine = msgspec.msgpack.encode(Greeting(self.node, str(folder), fraction))
        all_ranks = [msgspec.msgpack.decode(one, type=Greeting) for one in self.exchange(mine)]
        if len({one.node for one in all_ranks}) > 1:
            raise PlanError(
                f"split.infer.tp = {self.size} has an engine on ranks of several hosts: set it to "
                "a divisor of the ranks of one host"
            )
        fractions = [one.fraction for one in all_ranks if one.fraction is not None]
        return Path(all_ranks[0].folder), min(fractions, default=None)


ALONE = TensorParallel()


def check_sizes(spec: ModelSpec, size: int) -> None:
    """Raises: ConfigError unless SGLang can split the model over `size` ranks."""
    if spec.num_experts:
        check_shares(spec, size, f"split.infer.tp = {size}")
    for one in spec.distinct_tensors():
        if one.tp_cut is not None:
            one.tp_cut.check(size, f"split.infer.tp = {size}")
    last = shard_boxes(spec, size - 1, size)
    cut = [one.name for one in spec.parameters() if one.expert is None]
    if VOCAB_PADDING % size or not all(last[name].num_elements for name in cut):
        raise ConfigError(
            f"split.infer.tp = {size} leaves ranks without a token of the vocabulary: SGLang pads "
            f"its {spec.vocab_size} rows to a multiple of {VOCAB_PADDING}, and splits them evenly"
        )


@lru_cache(maxsize=16)  # a plan asks again for each layout
def shard_boxes(spec: ModelSpec, rank: int, size: int) -> Mapping[str, Box]:
    """Return the box of each tensor that rank `rank` of `size` has; it may be empty.

    It is for tensors of experts that other ranks have.
    """
    return parts(spec, Along(rank, size), SGLANG)

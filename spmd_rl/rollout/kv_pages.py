"""Pages of keys and values: a token's bytes in them, and how many an engine has room for. Pure."""

from __future__ import annotations

from typing import ClassVar

from spmd_rl.config.rules import require
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.formats.coded_cache import CacheFormat, Exponents, require_keys
from spmd_rl.model.spec import ModelSpec


def cache_token_bytes(
    spec: ModelSpec, element_bytes: int, tp: int = 1, cache: CacheFormat = "full"
) -> int:
    """Return the bytes that one of `tp` ranks keeps of each token in pages, in all layers.

    With more ranks than key-value heads, several have the same. In 8 bits they are codes of a byte,
    and attention decodes those of one layer at a time: its copy is counted too.
    """
    caches = (block.cache(tp) for block in spec.blocks)
    elements = [one.num_elements for one in caches if one is not None]
    if cache == "full":
        return sum(elements) * element_bytes
    require_keys(spec)
    return sum(elements) + max(elements) * element_bytes


def num_state_slots(batch: int) -> int:
    """Return how many slots an engine has for the states that layers hand on: for each sequence of
    a batch, for padding, and for snapshots.
    """
    return sum(snapshot_slots(batch))


def snapshot_slots(batch: int) -> tuple[int, int]:
    """Return the first slot of snapshots, and their number: an eighth of the sequences of a batch,
    for samples of a prompt follow each other.
    """
    return batch + 1, max(1, batch // 8)


def kv_budget(capacity_bytes: int, fraction: float, beside_bytes: int) -> int:
    """Return the bytes left for pages, of the `fraction` of a GPU that a run may use.

    The result is below 0 where other memory (`beside_bytes`) takes more than that.
    """
    return int(capacity_bytes * fraction) - beside_bytes


def kv_pages(
    token_bytes: int, page_size: int, *, context: int, batch: int, budget_bytes: int | None
) -> int:
    """Return the number of pages for an engine whose config does not set it.

    It suffices for a full batch of whole contexts of `context` tokens if the budget allows that,
    and for one whole context in any case.
    """
    context_pages = -(-context // page_size)
    num_wanted = batch * context_pages
    affordable = num_wanted
    if budget_bytes is not None and token_bytes:
        affordable = budget_bytes // (token_bytes * page_size)
    return max(context_pages, min(num_wanted, affordable))


class UnpagedConfig:
    """What the plan reads of the config of an engine whose pages another program sizes."""

    max_batch: int
    dtype: str

    promises_bits: ClassVar[bool] = False  # the kernels are not the trainer's
    weights: ClassVar[WeightFormat] = "full"  # a push brings them in `dtype`
    cache: ClassVar[CacheFormat] = "full"
    cache_exponents: ClassVar[Exponents] = (0, 0)
    maps_peers: ClassVar[bool] = False  # memory of its ranks is the other program's own
    # the plan counts keys and values by the token
    num_pages: ClassVar[int] = 0
    page_tokens: ClassVar[int] = 1
    max_step_tokens: ClassVar[int] = 0

    def _check_sizes(self) -> None:
        """Raises: ConfigError for a batch or a dtype that no engine has."""
        require(self.max_batch >= 1, "max_batch", self.max_batch, "at least 1")
        fits = self.dtype in ("auto", "float32", "bfloat16")
        require(fits, "dtype", self.dtype, '"auto", "float32" or "bfloat16"')

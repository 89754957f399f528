"""Settings of the native engine."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import ClassVar, Literal

from spmd_rl.config.combinations import ON, Combination, compared, refuse
from spmd_rl.config.rules import require
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.formats.coded_cache import (
    CACHE_REFUSED,
    CacheFormat,
    Exponents,
    check_exponents,
)
from spmd_rl.offload.ledger import TagBytes

GPU_PAGE_SIZE = 128  # tokens: what FlashAttention's copies of keys and values take whole
STEP_TOKENS = "0 (automatic), or at least max_batch"
REFUSED = (
    *CACHE_REFUSED,
    Combination(
        {"max_batch": compared("above", "max_step_tokens", operator.gt), "max_step_tokens": ON},
        "{1}: expected " + STEP_TOKENS,
    ),
)
GPU_STEP_TOKENS = 8192  # decoding and chunks of prompts together


@dataclass(frozen=True)
class NativeEngineConfig:
    """The native engine: its memory, and how much it does in a step."""

    promises_bits: ClassVar[bool] = True  # its log-probs are the trainer's, to the bit
    returns_kept_sets: ClassVar[bool] = True  # as SamplingConfig.replay_filters says
    sleep_weights: ClassVar[bool] = True  # its weights too are given back while it sleeps

    kind: Literal["native"] = "native"  # which engine generates
    page_size: int = 0  # tokens; 0: 128 where FlashAttention runs, else 16
    # 0: whole contexts for max_batch sequences, up to 1 GiB (CPU) or memory_fraction (GPU)
    num_pages: int = 0
    # of a GPU's memory, for the pages and everything that the plan counts beside them
    memory_fraction: float = 0.9
    max_batch: int = 256  # sequences running at once
    # of decoding (one a sequence) and chunks of prompts together; 0: 8192 (GPU) or 2048 (CPU)
    max_step_tokens: int = 0
    # of prompts between two decoding steps, as estimated, where these are CUDA graphs; 0: no limit
    max_prefill_ms: float = 40.0
    # compute and store the keys and values of a common prefix once
    prefix_cache: bool = True
    # where FlashAttention runs: record decoding steps, and launch each before the last is read
    cuda_graphs: bool = True
    dtype: str = "auto"  # bfloat16 on GPUs, float32 on CPUs
    # of layers, as in the trainer: in `dtype`, or codes of 8 or 4 bits (docs/low-precision.md)
    weights: WeightFormat = "full"
    # of keys and values, as in the trainer: in `dtype`, or codes of 8 bits
    cache: CacheFormat = "full"
    cache_exponents: Exponents = (0, 0)  # of two: scales of the codes of keys, and of values
    # tokens whose keys are attended to at once, as in the trainer; 0: all (docs/numerics.md)
    attention_split: int = 0
    load_weights: bool = True  # false leaves the parameters to the first push

    @property
    def page_tokens(self) -> int:
        """The tokens of a page on a GPU."""
        return self.page_size or GPU_PAGE_SIZE

    @property
    def maps_peers(self) -> bool:
        """Whether ranks of a host map each other's memory, so that steps can be recorded."""
        return self.cuda_graphs

    def memory_beside(self, weight_bytes: int, on_gpu: bool, tp: int) -> list[TagBytes]:
        """Return what a rank keeps besides weights, pages and the work of a step: nothing."""
        return []

    def __post_init__(self) -> None:
        self._check_pages()
        check_exponents(self.cache_exponents)
        refuse(REFUSED, self)
        require(0 < self.memory_fraction < 1, "memory_fraction", self.memory_fraction, "in (0, 1)")
        require(self.max_batch >= 1, "max_batch", self.max_batch, "at least 1")
        require(self.max_step_tokens >= 0, "max_step_tokens", self.max_step_tokens, STEP_TOKENS)
        fits = 0 <= self.max_prefill_ms < math.inf
        require(fits, "max_prefill_ms", self.max_prefill_ms, "0 (no limit) or more, and finite")
        fits = self.dtype in ("auto", "float32", "bfloat16")
        require(fits, "dtype", self.dtype, '"auto", "float32" or "bfloat16"')

    def _check_pages(self) -> None:
        """Raises: ConfigError for sizes of pages and splits that do not divide each other."""
        divides = self.page_size > 0 and (64 % self.page_size == 0 or self.page_size % 64 == 0)
        expected = "0 (automatic), or a divisor or a multiple of 64"
        require(self.page_size == 0 or divides, "page_size", self.page_size, expected)
        unit = math.lcm(GPU_PAGE_SIZE, self.page_size or GPU_PAGE_SIZE)
        fits = self.attention_split >= 0 and self.attention_split % unit == 0
        require(fits, "attention_split", self.attention_split, f"0 (all), or a multiple of {unit}")
        require(self.num_pages >= 0, "num_pages", self.num_pages, "0 (automatic) or more")

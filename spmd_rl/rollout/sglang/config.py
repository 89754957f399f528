"""Config of the SGLang engine. It imports neither torch nor SGLang."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from spmd_rl.config.rules import require
from spmd_rl.offload.gpu_overhead import CONTEXT_BYTES, NCCL_BYTES, NCCL_KERNEL_BYTES
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.rollout.kv_pages import UnpagedConfig

MIB = 1 << 20
LEAST_SLAB_BYTES = 4096


@dataclass(frozen=True)
class SglangEngineConfig(UnpagedConfig):
    """The SGLang engine: one scheduler in a child process of each rank (docs/sglang.md)."""

    returns_kept_sets: ClassVar[bool] = False  # SGLang does not say which tokens it left

    kind: Literal["sglang"] = "sglang"  # which engine generates
    # of the child: an interpreter, or a folder that SGLang was installed into; "" is our own
    python: str = ""
    # SGLang's own, by the names of its ServerArgs, such as engine.options.attention_backend
    options: dict[str, Any] = field(default_factory=dict)
    # of a GPU's memory, for weights, keys and values and everything that the plan counts
    memory_fraction: float = 0.85
    max_batch: int = 256  # sequences running at once
    dtype: str = "auto"  # bfloat16 on GPUs, float32 on CPUs
    # give back the weights too while the engine sleeps; they return with the next push
    sleep_weights: bool = True
    slab_bytes: int = 512 * MIB  # of the GPU, through which a push passes, in two halves
    start_deadline_s: float = 600.0  # for the child to load, and to record its graphs
    # for an answer to an abort, a push, a sleep or a wake, and for the next token
    answer_deadline_s: float = 120.0

    def memory_beside(self, weight_bytes: int, on_gpu: bool, tp: int) -> list[TagBytes]:
        """Return what a rank keeps besides weights, pages and the work of a step.

        The slab of a push, the child's own context and its communicator stay while it sleeps.
        """
        child = CONTEXT_BYTES + (NCCL_BYTES + NCCL_KERNEL_BYTES if tp > 1 else 0)
        return [
            TagBytes("slab", min(self.slab_bytes, 2 * weight_bytes), "fixed"),
            TagBytes("child", child if on_gpu else 0, "fixed"),
        ]

    def __post_init__(self) -> None:
        require(0 < self.memory_fraction < 1, "memory_fraction", self.memory_fraction, "in (0, 1)")
        self._check_sizes()
        fits = self.slab_bytes >= LEAST_SLAB_BYTES
        require(fits, "slab_bytes", self.slab_bytes, f"at least {LEAST_SLAB_BYTES}")
        for name in ("start_deadline_s", "answer_deadline_s"):
            value = getattr(self, name)
            require(0 < value < math.inf, name, value, "more than 0, and finite")

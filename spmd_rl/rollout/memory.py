"""Memory of an engine on one rank: from config and model, without torch. Units: bytes.

An engine takes as many pages of keys and values as there is room for, so the plan sizes them last.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from spmd_rl.model.lora import NO_LORA, LoraConfig
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.gpu_overhead import CONTEXT_BYTES, NCCL_BYTES, NCCL_KERNEL_BYTES
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.rollout.engine import GPU_PAGE_SIZE, GPU_STEP_TOKENS, NativeEngineConfig
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.weights.layout import ITEM_BYTES

EngineConfig = NativeEngineConfig | SglangEngineConfig
KV = "kv"


def engine_memory(
    spec: ModelSpec, cfg: EngineConfig, on_gpu: bool, lora: LoraConfig = NO_LORA, tp: int = 1
) -> Sequence[TagBytes]:
    """Return what an engine takes of one of its ranks, by tag; its pages have no size yet.

    The temporary memory of a step belongs to its CUDA graphs, and sleeps when the pages do. With
    `lora` a push brings adapters alone, so that the base beside them is saved while it sleeps. The
    weights are split over `tp` ranks.
    """
    item_bytes = ITEM_BYTES[_dtype(cfg)]
    weights = spec.num_parameters * item_bytes // tp
    sleeps = isinstance(cfg, NativeEngineConfig) or cfg.sleep_weights
    memory = [
        TagBytes("weights", weights, "drop" if sleeps else "fixed"),
        TagBytes(KV, 0, "drop"),
        TagBytes("step", step_bytes(spec, cfg) if on_gpu else 0, "drop"),
    ]
    if lora.rank:
        adapters = sum(map(prod, lora.shapes(spec).values())) * item_bytes
        memory[0] = TagBytes("weights", weights, "save", changes=False)
        memory.append(TagBytes("adapters", adapters, "fixed"))
    if isinstance(cfg, SglangEngineConfig):
        # the slab of a push, the child's own context and its communicator stay while it sleeps
        memory.append(TagBytes("slab", min(cfg.slab_bytes, 2 * weights), "fixed"))
        child = CONTEXT_BYTES + (NCCL_BYTES + NCCL_KERNEL_BYTES if tp > 1 else 0)
        memory.append(TagBytes("child", child if on_gpu else 0, "fixed"))
    return memory


def step_bytes(spec: ModelSpec, cfg: EngineConfig) -> int:
    """Return the workspace of a step: one layer of its tokens, and twice a full batch's logits."""
    set_tokens = cfg.max_step_tokens if isinstance(cfg, NativeEngineConfig) else 0
    num_tokens = set_tokens or max(cfg.max_batch, GPU_STEP_TOKENS)
    layer = max(block.cost().workspace for block in spec.distinct_blocks())
    logits = cfg.max_batch * spec.vocab_size * ITEM_BYTES["float32"]
    return num_tokens * layer * ITEM_BYTES[_dtype(cfg)] + 2 * logits


def kv_bytes(
    spec: ModelSpec,
    cfg: EngineConfig,
    capacity_bytes: int | None,
    reserved_bytes: int,
    tp: int = 1,
) -> int:
    """Return the bytes of an engine's keys and values on one of its `tp` ranks: as many as are set,
    else as fit beside `reserved_bytes`.
    """
    token_bytes, page_size = _token_bytes(spec, cfg, tp), _page_size(cfg)
    budget = None
    if capacity_bytes is not None:
        budget = kv_budget(capacity_bytes, cfg.memory_fraction, reserved_bytes)
    pages = _set_pages(cfg) or kv_pages(
        token_bytes, page_size, context=spec.max_positions, batch=cfg.max_batch, budget_bytes=budget
    )
    return pages * page_size * token_bytes


def running_kv_bytes(
    spec: ModelSpec, cfg: EngineConfig, num_sequences: int, num_tokens: int, tp: int = 1
) -> int:
    """Return the bytes of the keys and values of so many sequences of so many tokens, on one of the
    `tp` ranks of an engine.

    It is what the pages must hold so that no sequence waits for another; at least one context, and
    as many as are set.
    """
    context = sequence_kv_bytes(spec, cfg, spec.max_positions, tp)
    if num_set := _set_pages(cfg):
        return num_set * _page_size(cfg) * _token_bytes(spec, cfg, tp)
    sequence = sequence_kv_bytes(spec, cfg, num_tokens, tp)
    return max(min(num_sequences, cfg.max_batch) * sequence, context)


def sequence_kv_bytes(spec: ModelSpec, cfg: EngineConfig, num_tokens: int, tp: int = 1) -> int:
    """Return the bytes of a sequence's keys and values on one of the `tp` ranks of an engine."""
    pages = -(-min(num_tokens, spec.max_positions) // _page_size(cfg))
    return pages * _page_size(cfg) * _token_bytes(spec, cfg, tp)


def cache_token_bytes(spec: ModelSpec, element_bytes: int, tp: int = 1) -> int:
    """Return the bytes that one of `tp` ranks keeps of each token in pages, in all layers.

    With more ranks than key-value heads, several have the same.
    """
    caches = (layer.cache(tp) for block in spec.blocks for layer in block.layers)
    return sum(one.num_elements for one in caches if one is not None) * element_bytes


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
    affordable = num_wanted if budget_bytes is None else budget_bytes // (token_bytes * page_size)
    return max(context_pages, min(num_wanted, affordable))


def _dtype(cfg: EngineConfig) -> str:
    return "bfloat16" if cfg.dtype == "auto" else cfg.dtype


def _token_bytes(spec: ModelSpec, cfg: EngineConfig, tp: int) -> int:
    return cache_token_bytes(spec, ITEM_BYTES[_dtype(cfg)], tp)


def _page_size(cfg: EngineConfig) -> int:
    return (cfg.page_size or GPU_PAGE_SIZE) if isinstance(cfg, NativeEngineConfig) else 1


def _set_pages(cfg: EngineConfig) -> int:
    return cfg.num_pages if isinstance(cfg, NativeEngineConfig) else 0

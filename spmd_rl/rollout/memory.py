"""Memory of an engine on one rank: from config and model, without torch. Units: bytes.

An engine takes as many pages of keys and values as there is room for, so the plan sizes them last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from spmd_rl.model.formats.coded_weights import coded_sizes
from spmd_rl.model.lora import NO_LORA, LoraConfig
from spmd_rl.model.parts.part import num_own_parts
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.offload.peer_bytes import EXCHANGE_BYTES, GatheredRow, gather_bytes
from spmd_rl.rollout.kinds import EngineConfig, kind_of
from spmd_rl.rollout.kv_pages import cache_token_bytes, kv_budget, kv_pages, num_state_slots
from spmd_rl.rollout.native.config import GPU_STEP_TOKENS
from spmd_rl.weights.plan.layout import ITEM_BYTES

KV = "kv"


def engine_memory(
    spec: ModelSpec,
    cfg: EngineConfig,
    on_gpu: bool,
    lora: LoraConfig = NO_LORA,
    tp: int = 1,
    ep: int = 1,
    row_shards: int = 1,
) -> Sequence[TagBytes]:
    """Return what an engine takes of one of its ranks, by tag; its pages have no size yet.

    The temporary memory of a step belongs to its CUDA graphs, and sleeps when the pages do. With
    `lora` a push brings adapters alone, so that the base beside them is saved while it sleeps. The
    weights are split over `tp` ranks, and the experts are shared by `ep`. Ranks that map each
    other's memory are taken as those of one host: on several hosts they allocate none. Models of
    the run sum in `row_shards` parts, if their bits are equal.
    """
    spec = replace(spec, row_shards=row_shards if cfg.promises_bits else 1)
    weights = weight_bytes(spec, cfg, tp, ep)
    step = step_bytes(spec, cfg, tp, ep) if on_gpu else 0
    memory = [
        TagBytes("weights", weights, "drop" if cfg.sleep_weights else "fixed"),
        TagBytes(KV, 0, "drop"),
        TagBytes("step", step, "drop"),
    ]
    if lora.rank:
        adapters = sum(map(prod, lora.shapes(spec).values())) * item_bytes(cfg)
        memory[0] = TagBytes("weights", weights, "save", changes=False)
        memory.append(TagBytes("adapters", adapters, "fixed"))
    if on_gpu and cfg.maps_peers and tp * ep > 1:
        memory.append(TagBytes("peers", peer_bytes(spec, cfg, tp, ep), "fixed"))
    return memory + cfg.memory_beside(weights, on_gpu, tp)


def peer_bytes(spec: ModelSpec, cfg: EngineConfig, tp: int, ep: int) -> int:
    """Return what a rank allocates so that others of its host map it: for the sums over `tp` ranks,
    and for the rows that `ep` ranks give each other's experts.
    """
    total = EXCHANGE_BYTES if tp > 1 else 0
    if ep > 1:
        copies = max(block.cost().routed for block in spec.distinct_blocks())
        chosen = copies // (2 * spec.hidden_size)
        row = GatheredRow(spec.hidden_size, chosen, item_bytes(cfg))
        total += sum(gather_bytes(row, ep * cfg.max_batch))
    return total


def weight_bytes(spec: ModelSpec, cfg: EngineConfig, tp: int, ep: int) -> int:
    """Return the bytes of the weights of a rank."""
    if tp > 1:
        boxes = kind_of(cfg).boxes(spec, 0, tp).values()  # the first rank has no less than others
        return sum(box.num_elements for box in boxes) * item_bytes(cfg)
    num_coded, coded_bytes = coded_sizes(spec, cfg.weights, ep)
    return (_held_parameters(spec, ep) - num_coded) * item_bytes(cfg) + coded_bytes


def _held_parameters(spec: ModelSpec, ep: int) -> int:
    """Return how many parameters a rank has where `ep` ranks share the experts."""
    if ep == 1:
        return spec.num_parameters
    num_shared = expert_elements(spec)
    return spec.num_parameters - num_shared + num_shared // ep


def expert_elements(spec: ModelSpec) -> int:
    """Return how many parameters all experts of a model have."""
    return sum(
        count * sum(one.num_elements for one in block.parameters() if one.expert is not None)
        for block, count in Counter(spec.blocks).items()
    )


def step_bytes(spec: ModelSpec, cfg: EngineConfig, tp: int = 1, ep: int = 1) -> int:
    """Return the workspace of a step: one layer of its tokens, and twice a full batch's logits.

    Where `ep` ranks share experts, rows that are sent and rows that come are there at once. Loads
    are taken as even. Where `tp` ranks share matrices, the sums of all ranks are there at once, and
    before them a rank's own parts beside their sum.
    """
    num_tokens = cfg.max_step_tokens or max(cfg.max_batch, GPU_STEP_TOKENS)
    costs = [block.cost(tp) for block in spec.distinct_blocks()]
    layer = max(one.in_forward + (one.routed if ep > 1 else 0) for one in costs)
    logits = cfg.max_batch * spec.vocab_size * ITEM_BYTES["float32"]
    num_own = num_own_parts(spec, tp)
    num_sums = max(num_own + 1, tp + 1) if tp > 1 else num_own
    sums = num_sums * spec.hidden_size * ITEM_BYTES["float32"]
    return num_tokens * (layer * item_bytes(cfg) + sums) + 2 * logits


def kv_bytes(
    spec: ModelSpec,
    cfg: EngineConfig,
    capacity_bytes: int | None,
    reserved_bytes: int,
    tp: int = 1,
) -> int:
    """Return the bytes of an engine's keys and values on one of its `tp` ranks: as many as are set,
    else as fit beside `reserved_bytes`. Those of the states that layers hand on are among them.
    """
    token_bytes, page_size = _token_bytes(spec, cfg, tp), cfg.page_tokens
    budget, states = None, _state_bytes(spec, cfg)
    if capacity_bytes is not None:
        budget = kv_budget(capacity_bytes, cfg.memory_fraction, reserved_bytes + states)
    pages = cfg.num_pages or kv_pages(
        token_bytes, page_size, context=spec.max_positions, batch=cfg.max_batch, budget_bytes=budget
    )
    return pages * page_size * token_bytes + states


def running_kv_bytes(
    spec: ModelSpec, cfg: EngineConfig, num_sequences: int, num_tokens: int, tp: int = 1
) -> int:
    """Return the bytes of the keys and values of so many sequences of so many tokens, on one of the
    `tp` ranks of an engine.

    It is what the pages must hold so that no sequence waits for another; at least one context, and
    as many as are set.
    """
    context, states = sequence_kv_bytes(spec, cfg, spec.max_positions, tp), _state_bytes(spec, cfg)
    if cfg.num_pages:
        return cfg.num_pages * cfg.page_tokens * _token_bytes(spec, cfg, tp) + states
    sequence = sequence_kv_bytes(spec, cfg, num_tokens, tp)
    return max(min(num_sequences, cfg.max_batch) * sequence, context) + states


def sequence_kv_bytes(spec: ModelSpec, cfg: EngineConfig, num_tokens: int, tp: int = 1) -> int:
    """Return the bytes of a sequence's keys and values on one of the `tp` ranks of an engine."""
    pages = -(-min(num_tokens, spec.max_positions) // cfg.page_tokens)
    return pages * cfg.page_tokens * _token_bytes(spec, cfg, tp)


def item_bytes(cfg: EngineConfig) -> int:
    """Return the bytes of an element of an engine on a GPU."""
    return ITEM_BYTES["bfloat16" if cfg.dtype == "auto" else cfg.dtype]


def _state_bytes(spec: ModelSpec, cfg: EngineConfig) -> int:
    """Return the bytes of all slots of the states that layers hand on."""
    return num_state_slots(cfg.max_batch) * spec.state_bytes(item_bytes(cfg))


def _token_bytes(spec: ModelSpec, cfg: EngineConfig, tp: int) -> int:
    return cache_token_bytes(spec, item_bytes(cfg), tp, cfg.cache)

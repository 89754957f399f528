"""How many pages of keys and values an engine gets when its config does not say."""

from __future__ import annotations

import torch

from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import kv_token_bytes
from spmd_rl.rollout.engine import EngineConfig

CPU_POOL_BYTES = 1 << 30


def auto_pages(spec: ModelSpec, cfg: EngineConfig, device: torch.device) -> int:
    """Whole contexts for a full batch, as far as memory allows; at least one whole context."""
    context = -(-spec.max_positions // cfg.page_size)
    element_bytes = getattr(torch, cfg.dtype).itemsize
    bytes_per_token = kv_token_bytes(spec.num_layers, spec.num_kv_heads, spec.head_dim, element_bytes)
    if device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(device)[0] * cfg.memory_fraction)
    else:
        budget = CPU_POOL_BYTES
    affordable = budget // (bytes_per_token * cfg.page_size)
    return max(context, min(cfg.max_batch * context, affordable))

"""Automatic sizes: page size, step size and number of pages that the config leaves at 0."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from spmd_rl.kernels.attention.flash import flash_takes
from spmd_rl.kernels.contract import dtype_of
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import as_size, kv_budget, kv_pages, kv_token_bytes
from spmd_rl.rollout.engine import GPU_PAGE_SIZE, GPU_STEP_TOKENS, EngineConfig

CPU_POOL_BYTES = 1 << 30
# Pages take at most this share of a GPU's free memory if the ledger did not count the rest.
FREE_SHARE = 0.4
PAGE_SIZE = 16
CPU_STEP_TOKENS = 2048


def settle(cfg: EngineConfig, spec: ModelSpec, device: torch.device) -> EngineConfig:
    """Return `cfg` with a number for every size that it leaves at 0, and with a dtype."""
    cfg = replace(cfg, dtype=dtype_of(cfg.dtype, device))
    flash = flash_takes(spec.head_dim, getattr(torch, cfg.dtype), device)
    step_tokens = max(cfg.max_batch, GPU_STEP_TOKENS if device.type == "cuda" else CPU_STEP_TOKENS)
    cfg = replace(
        cfg,
        page_size=cfg.page_size or (GPU_PAGE_SIZE if flash else PAGE_SIZE),
        max_step_tokens=cfg.max_step_tokens or step_tokens,
    )
    return replace(cfg, num_pages=cfg.num_pages or auto_pages(spec, cfg, device))


def auto_pages(spec: ModelSpec, cfg: EngineConfig, device: torch.device) -> int:
    """Return the ledger's number of pages, within the memory that there is for them.

    `cfg` has its dtype and its page size set.
    """
    item_bytes = getattr(torch, cfg.dtype).itemsize
    token_bytes = kv_token_bytes(spec.num_layers, spec.num_kv_heads, spec.head_dim, item_bytes)
    budget = _gpu_budget(cfg, device) if device.type == "cuda" else CPU_POOL_BYTES
    pages = kv_pages(
        token_bytes,
        cfg.page_size,
        context=spec.max_positions,
        batch=cfg.max_batch,
        budget_bytes=budget,
    )
    if (num_bytes := pages * cfg.page_size * token_bytes) > budget:
        room = f"beside all else there is room for {as_size(max(budget, 0))} of keys and values"
        warnings.warn(
            f"{room}, and one context of {spec.max_positions} tokens takes {as_size(num_bytes)}",
            stacklevel=2,
        )
    return pages


def _gpu_budget(cfg: EngineConfig, device: torch.device) -> int:
    """Return the bytes left for pages.

    They are what is left beside all that the ledger counts, or beside what is in use now, whichever
    is less.
    """
    torch.cuda.empty_cache()  # memory that torch keeps for later is free too
    free_bytes, capacity_bytes = torch.cuda.mem_get_info(device)
    left = kv_budget(
        capacity_bytes, cfg.memory_fraction, max(cfg.beside_bytes, capacity_bytes - free_bytes)
    )
    return left if cfg.beside_bytes else min(left, int(free_bytes * FREE_SHARE))

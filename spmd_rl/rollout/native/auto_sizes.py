"""Sizes of a native engine: those that its config sets, and those that it leaves to the machine."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch

from spmd_rl.kernels.contract import dtype_of
from spmd_rl.kernels.linear.shard_exchange import ShardExchange
from spmd_rl.mesh.shared_gpus import ranks_per_gpu
from spmd_rl.model.attention import backend_of
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import as_size
from spmd_rl.rollout.kv_pages import cache_token_bytes, kv_budget, kv_pages, num_state_slots
from spmd_rl.rollout.native.config import GPU_STEP_TOKENS, NativeEngineConfig

CPU_POOL_BYTES = 1 << 30
# of a GPU's free memory, for the pages of an engine that no plan has counted
FREE_SHARE = 0.4
CPU_STEP_TOKENS = 2048


@dataclass(frozen=True)
class EngineSizes:
    """A number for every size that a config may leave at 0, and the type of the keys and values."""

    dtype: torch.dtype
    page_size: int
    num_pages: int
    max_step_tokens: int

    @property
    def num_kv_tokens(self) -> int:
        """How many tokens all pages hold."""
        return self.num_pages * self.page_size


def choose_sizes(
    cfg: NativeEngineConfig, spec: ModelSpec, device: torch.device, reserved_bytes: int = 0
) -> EngineSizes:
    """Return the sizes of an engine on `device`.

    `reserved_bytes` is the memory that the plan counts beside the engine's pages; 0: not counted.
    """
    dtype: torch.dtype = getattr(torch, dtype_of(cfg.dtype, device))
    backend = backend_of(spec, dtype, device)
    step_tokens = max(cfg.max_batch, GPU_STEP_TOKENS if device.type == "cuda" else CPU_STEP_TOKENS)
    page_size = cfg.page_size or backend.default_page_size
    num_pages = cfg.num_pages or auto_pages(spec, cfg, device, dtype, page_size, reserved_bytes)
    return EngineSizes(dtype, page_size, num_pages, cfg.max_step_tokens or step_tokens)


def agree(sizes: EngineSizes, exchange: ShardExchange | None, device: torch.device) -> EngineSizes:
    """Return the sizes of all ranks that share a model: the fewest pages that one of them has.

    Ranks: all of these. Blocks: until each has called.
    """
    if exchange is None:
        return sizes
    own = torch.tensor([[sizes.num_pages]], device=device)
    return replace(sizes, num_pages=int(exchange.gather_columns(own).min()))


def auto_pages(
    spec: ModelSpec,
    cfg: NativeEngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    reserved_bytes: int = 0,
) -> int:
    """Return the ledger's number of pages, as far as there is memory for them.

    A model whose longest context does not fit gets one context of pages anyhow, and a warning.
    """
    token_bytes = cache_token_bytes(spec, dtype.itemsize, cache=cfg.cache)
    on_gpu = device.type == "cuda"
    budget = _gpu_budget(cfg, device, reserved_bytes) if on_gpu else CPU_POOL_BYTES
    budget -= num_state_slots(cfg.max_batch) * spec.state_bytes(dtype.itemsize)
    pages = kv_pages(
        token_bytes,
        page_size,
        context=spec.max_positions,
        batch=cfg.max_batch,
        budget_bytes=budget,
    )
    if (num_bytes := pages * page_size * token_bytes) > budget:
        room = f"beside all else there is room for {as_size(max(budget, 0))} of keys and values"
        warnings.warn(
            f"{room}, and one context of {spec.max_positions} tokens takes {as_size(num_bytes)}",
            stacklevel=2,
        )
    return pages


def _gpu_budget(cfg: NativeEngineConfig, device: torch.device, reserved_bytes: int) -> int:
    """Return the bytes left for pages beside what is reserved, or what is in use now if that is
    more. Ranks that share a GPU have equal parts of it.
    """
    torch.cuda.empty_cache()  # memory that torch's allocator keeps for later counts as free
    num_ranks = ranks_per_gpu()
    free_bytes, capacity_bytes = (one // num_ranks for one in torch.cuda.mem_get_info(device))
    in_use_bytes = capacity_bytes - free_bytes
    left = kv_budget(capacity_bytes, cfg.memory_fraction, max(reserved_bytes, in_use_bytes))
    return left if reserved_bytes else min(left, int(free_bytes * FREE_SHARE))

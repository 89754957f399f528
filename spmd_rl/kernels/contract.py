"""The numeric contract as data: what must be the same on every rank and in both roles for bits to agree."""

from __future__ import annotations

import torch

from spmd_rl.kernels.attention import KV_BLOCK, QUERY_TILE
from spmd_rl.kernels.flash import FLASH_HEAD_DIMS, flash_takes, flash_version
from spmd_rl.kernels.linear import keeps_chain
from spmd_rl.kernels.logprob import NUM_VOCAB_SHARDS, VOCAB_CHUNK
from spmd_rl.kernels.tile import ROW_TILE

CONTRACT_VERSION = 2


def contract(
    device: torch.device, dtype: torch.dtype, head_dim: int | None = None, attention_split: int = 0
) -> dict[str, str | int]:
    """Every fact that can change a bit of a forward pass on this rank; `head_dim` settles which attention runs."""
    facts: dict[str, str | int] = {
        "version": CONTRACT_VERSION,
        "row_tile": ROW_TILE,
        "kv_block": KV_BLOCK,
        "query_tile": QUERY_TILE,
        "vocab_shards": NUM_VOCAB_SHARDS,
        "vocab_chunk": VOCAB_CHUNK,
        "torch": str(torch.__version__),
        "dtype": str(dtype),
        "device": device.type,
        "attention_split": attention_split,
    }
    if device.type == "cpu":
        isa, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
        return facts | {"attention": "blocked", "linear": "library", "isa": isa, "threads": threads}
    return facts | _gpu_facts(device, dtype, head_dim)


def _gpu_facts(device: torch.device, dtype: torch.dtype, head_dim: int | None) -> dict[str, str | int]:
    from triton import __version__ as triton_version

    exact = flash_takes(head_dim or FLASH_HEAD_DIMS[0], dtype, device)
    return {
        "attention": f"flash-attn-4 {flash_version()} causal, one split" if exact else "sdpa, no promise",
        "linear": "one ascending chain" if keeps_chain(dtype, device) else "library, no promise",
        "gpu": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda or "",
        "triton": triton_version,
        "tf32": int(torch.backends.cuda.matmul.allow_tf32),
        "bf16_reduced": int(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
    }

"""The numeric contract as data: what must be the same on every rank and in both roles for bits to agree."""

from __future__ import annotations

import hashlib
import json

import torch

from spmd_rl.kernels.attention import KV_BLOCK
from spmd_rl.kernels.logprob import NUM_VOCAB_SHARDS, VOCAB_CHUNK
from spmd_rl.kernels.tile import ROW_TILE

CONTRACT_VERSION = 1


def contract(device: torch.device, dtype: torch.dtype) -> dict[str, str | int]:
    """Every fact that can change a bit of a forward pass on this rank."""
    facts: dict[str, str | int] = {
        "version": CONTRACT_VERSION,
        "row_tile": ROW_TILE,
        "kv_block": KV_BLOCK,
        "vocab_shards": NUM_VOCAB_SHARDS,
        "vocab_chunk": VOCAB_CHUNK,
        "torch": torch.__version__,
        "dtype": str(dtype),
        "device": device.type,
    }
    if device.type == "cpu":
        facts |= {"isa": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    else:
        facts |= {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda or "",
            "tf32": int(torch.backends.cuda.matmul.allow_tf32),
            "bf16_reduced": int(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        }
    return facts


def contract_digest(device: torch.device, dtype: torch.dtype) -> str:
    """Sixteen hex digits of SHA-256 over `contract`."""
    return hashlib.sha256(json.dumps(contract(device, dtype), sort_keys=True).encode()).hexdigest()[:16]

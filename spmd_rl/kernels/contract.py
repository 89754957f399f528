"""Numeric contract as data: the facts that all ranks and both roles must share for equal bits."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from spmd_rl.kernels.attention.backend import attention_backend
from spmd_rl.kernels.attention.flash import FLASH_HEAD_DIMS
from spmd_rl.kernels.delta.rule import DELTA_RULE
from spmd_rl.kernels.latents.sizes import MLA_RULE
from spmd_rl.kernels.linear.linear import keeps_chain
from spmd_rl.kernels.runtime.capability import AMPERE, HOPPER
from spmd_rl.kernels.runtime.padding import COLUMN_UNIT, ROW_TILE
from spmd_rl.kernels.runtime.versions import DSL, installed
from spmd_rl.kernels.vocab.logprob import NUM_VOCAB_SHARDS, TEMPERATURE_RULE, VOCAB_CHUNK
from spmd_rl.kernels.vocab.sampling import RANDOM_SCHEME

CONTRACT_VERSION = 2
# the packages of cuBLAS that torch's wheels bring: for CUDA 13, and before
CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu12")
SOURCES = tuple(
    sorted(path for path in Path(__file__).parent.rglob("*") if path.suffix in (".py", ".cu"))
)


def contract(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int | None = None,
    attention_split: int = 0,
    latent_dim: int = 0,
) -> dict[str, str | int]:
    """Return every fact that can change a bit of a forward pass or of a draw here.

    `head_dim` and `latent_dim` settle which attention runs. The version of a package that is not
    installed is an empty string.
    """
    facts: dict[str, str | int] = {
        "version": CONTRACT_VERSION,
        "kernels": digest_of(SOURCES),
        "row_tile": ROW_TILE,
        "vocab_shards": NUM_VOCAB_SHARDS,
        "vocab_chunk": VOCAB_CHUNK,
        "temperature": TEMPERATURE_RULE,
        "delta": DELTA_RULE,
        "mla": MLA_RULE,
        "random": RANDOM_SCHEME,
        "torch": str(torch.__version__),
        "dtype": str(dtype),
        "device": device.type,
        "attention_split": attention_split,
    }
    head_dim = head_dim or FLASH_HEAD_DIMS[0]
    attention = attention_backend(head_dim, dtype, device, latent_dim=latent_dim)
    rest = _cpu_facts() if device.type == "cpu" else _gpu_facts(device, dtype)
    return facts | attention.facts() | rest


@cache
def digest_of(sources: tuple[Path, ...]) -> str:
    """Return a digest of code on which bits depend: ranks must run the same code."""
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def dtype_of(asked: str, device: torch.device) -> Literal["float32", "bfloat16"]:
    """Return the dtype that a config asks for; for "auto", the one that keeps the contract."""
    if asked == "auto" and device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device)[0] >= AMPERE else "float32"
    return "bfloat16" if asked == "bfloat16" else "float32"


def cublas_version() -> str:
    """Return the version of the cuBLAS that torch's wheel brought, or an empty string."""
    return next(filter(None, map(installed, CUBLAS)), "")


def _cpu_facts() -> dict[str, str | int]:
    return {
        "column_unit": COLUMN_UNIT,
        "linear": "library",
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _gpu_facts(device: torch.device, dtype: torch.dtype) -> dict[str, str | int]:
    from triton import __version__ as triton_version

    from spmd_rl.kernels.rowwise.norm_triton import NUM_WARPS, TILE_ELEMENTS
    from spmd_rl.kernels.vocab.logprob_triton import SUM_WARPS

    capability = torch.cuda.get_device_capability(device)
    compared = "" if capability[0] == HOPPER else ", tiles not compared"
    return {
        "linear": f"one ascending chain{compared}"
        if keeps_chain(dtype, device)
        else "library, no promise",
        "norm_elements": TILE_ELEMENTS,
        "norm_warps": NUM_WARPS,
        "vocab_warps": SUM_WARPS,
        "gpu": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, capability)),
        "cuda": torch.version.cuda or "",
        "cublas": cublas_version(),
        "triton": triton_version,
        **{package: installed(package) or "" for package in DSL},
        "tf32": int(torch.backends.cuda.matmul.allow_tf32),
        "bf16_reduced": int(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
    }

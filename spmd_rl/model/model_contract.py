"""Numeric contract of a model: all on which the bits of its forward pass depend but its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from spmd_rl.kernels import contract, rope_table
from spmd_rl.kernels.contract import digest_of
from spmd_rl.mkl import warm_up_functions
from spmd_rl.model.attention import head_size, latent_size
from spmd_rl.model.layers.moe import MOE_RULE
from spmd_rl.model.rope_frequencies import inverse_frequencies
from spmd_rl.model.spec import ModelSpec

_OWN = ("network", "linear", "fused_projections", "rope_frequencies", "parts/shared_products")
SOURCES = (
    *(Path(__file__).parent / f"{name}.py" for name in _OWN),
    *sorted(Path(__file__).with_name("layers").glob("*_module.py")),
    *sorted(Path(__file__).with_name("formats").glob("*.py")),
)


def model_contract(
    spec: ModelSpec,
    tables: tuple[Tensor, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    attention_split: int = 0,
) -> dict[str, str | int]:
    """Return the kernels' contract on `device`, and the model's own facts.

    `tables` are the rotary ones. The host's cosine makes them, whose bits differ between kinds of
    processor.
    """
    digest = hashlib.sha256(b"".join(half.cpu().numpy().tobytes() for half in tables))
    own = {
        "network": digest_of(SOURCES),
        "model": spec.arithmetic,
        "rotary_table": digest.hexdigest()[:16],
    }
    moe = {"moe": MOE_RULE} if spec.num_experts else {}
    sizes = head_size(spec), attention_split, latent_size(spec)
    return contract(device, dtype, *sizes) | own | moe


def rope_tables(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all positions on the host, [P, D/2] fp32 each."""
    warm_up_functions()
    # they must allow gradients later, even if an engine asks first
    with torch.device("cpu"), torch.inference_mode(False):
        return rope_table(
            inverse_frequencies(spec.rope), spec.max_positions, spec.rope.attention_factor
        )

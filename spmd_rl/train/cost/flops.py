"""FLOPs of a train step, and the peak of a device."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from spmd_rl.model.lora import NO_LORA, LoraConfig
from spmd_rl.model.spec import ModelSpec

# dense bf16 operations per second, from the data sheets; the first name that fits counts
PEAK_FLOPS_PER_S = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
}


def train_flops(
    spec: ModelSpec, lengths: NDArray[np.int32], num_scored: int, lora: LoraConfig = NO_LORA
) -> float:
    """Return the operations of a forward and backward pass over packed sequences.

    Recomputation does not count.

    6 for each weight of the layers that a token is multiplied with, 6 for each weight of the head
    and each scored token, and for attention 3 times the forward pass's operations of each pair of
    tokens in the lower triangle. Weights beside adapters count 4 and not 6: they have no gradient.
    """
    num_adapted = sum(math.prod(shape) for shape in lora.shapes(spec).values())
    of_weight = 4.0 if lora.rank else 6.0
    blocks = [block.cost() for block in spec.blocks]
    lengths = lengths.astype(np.float64)
    num_pairs = float((lengths**2).sum()) / 2
    attention = num_pairs * sum(block.flops_per_key for block in blocks)
    head = spec.vocab_size * spec.hidden_size * num_scored
    num_tokens = float(lengths.sum())
    of_weights = of_weight * (sum(block.multiplied for block in blocks) * num_tokens + head)
    return of_weights + 3.0 * attention + 6.0 * num_adapted * num_tokens


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the operations per second that a device could do, None where that is not known."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for model, peak in PEAK_FLOPS_PER_S.items() if model in name), None)

"""Frequencies of rotary positions, for each rope_type.

Source: the definitions that Hugging Face configs refer to: Llama 3.1's model card (llama3) and Peng
et al., YaRN (2023). Tested against transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spmd_rl.model.rope_spec import RopeSpec


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """Return the angle per position of each pair of dimensions. Shape: [rope.size / 2] fp32."""
    exponents = torch.arange(0, rope.size, 2, dtype=torch.int64).float() / rope.size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Stretch long wavelengths by the factor, keep short ones, and interpolate between."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_positions / rope.low_freq_factor
    shortest = rope.original_positions / rope.high_freq_factor
    smooth = (rope.original_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, between)
    return torch.where(wavelengths < shortest, frequencies, stretched)


def _yarn(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Interpolate between stretched and plain frequencies, along a ramp over the dimensions.

    The ramp lies between the dimensions that turn `beta_fast` and `beta_slow` times in the original
    context.
    """
    first = _dimension(rope.beta_fast, rope)
    last = _dimension(rope.beta_slow, rope)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, rope.size - 1)
    ramp = _ramp(low, high, rope.size // 2)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


def _ramp(low: float, high: float, size: int) -> Tensor:
    """Return a ramp over indices, 0 up to `low` and 1 from `high` on."""
    span = 0.001 if low == high else high - low
    return ((torch.arange(size, dtype=torch.float32) - low) / span).clamp(0, 1)


def _dimension(turns: float, rope: RopeSpec) -> float:
    """Return the dimension that turns this many times in the original context."""
    return (
        rope.size
        * math.log(rope.original_positions / (turns * 2 * math.pi))
        / (2 * math.log(rope.theta))
    )

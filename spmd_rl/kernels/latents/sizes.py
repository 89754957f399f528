"""Sizes of latents, and how attention computes with them."""

from __future__ import annotations

from typing import NamedTuple

# queries are brought to latents, and what attention gives is brought from them, on both sides
MLA_RULE = "absorbed-v1"


class LatentSizes(NamedTuple):
    """Elements of a key: its latent part, which is the value too, and before it a rotary one."""

    latent: int
    rotary: int

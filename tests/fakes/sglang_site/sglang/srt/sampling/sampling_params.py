"""Sampling of the stand-in."""

from __future__ import annotations


class SamplingParams:
    def __init__(self, temperature: float, max_new_tokens: int) -> None:
        pass

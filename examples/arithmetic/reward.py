"""The reward of this example: one for the right sum, nothing else counts."""

from __future__ import annotations

from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


def correct(prompt: Prompt, sample: Sample) -> float:
    """1 when the response is exactly the answer and ended by itself."""
    return float(sample.finish == "stop" and sample.text == prompt.answer)

"""The reward of this example: one for the right sum, nothing else counts."""

from __future__ import annotations

from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


def correct(prompt: Prompt, sample: Sample) -> float:
    """1 when the response is exactly the answer and ended by itself."""
    return float(sample.status == "completed" and sample.text == prompt.answer)


def in_parts(prompt: Prompt, sample: Sample) -> dict[str, float]:
    """The same as parts, which an algorithm for several rewards such as gdpo learns from."""
    right = correct(prompt, sample)
    return {"reward": right, "right": right, "ended": float(sample.status == "completed")}

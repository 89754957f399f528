"""A prompt and a sample for tests of graders."""

from __future__ import annotations

from typing import Any

import numpy as np

from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


def ask(answer: str = "", text: str = "", **meta: Any) -> Prompt:
    return Prompt(7, np.array([1], np.int32), text=text, answer=answer, meta=meta)


def say(text: str, status: Any = "completed") -> Sample:
    zeros = np.zeros(1, np.int32)
    return Sample(7, 3, zeros, np.zeros(1, np.float32), zeros, status, text=text)

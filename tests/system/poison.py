"""Reward functions that fail at one sample."""

from __future__ import annotations

import threading

from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from tests.system.faults import struck_file

POISONED = 5  # the prompt at which they fail


def nan(prompt: Prompt, sample: Sample) -> float:
    return float("nan") if strikes(prompt) else float(sample.index)


def hangs(prompt: Prompt, sample: Sample) -> float:
    if strikes(prompt):
        threading.Event().wait()
    return float(sample.index)


def raises(prompt: Prompt, sample: Sample) -> float:
    if strikes(prompt):
        raise ValueError("poisoned")
    return float(sample.index)


def strikes(prompt: Prompt) -> bool:
    if prompt.uid == POISONED:
        struck_file().touch()
    return prompt.uid == POISONED

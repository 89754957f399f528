"""Opponents of games in tests."""

from __future__ import annotations

import re

import numpy as np


def any_move(text: str, rng: np.random.Generator) -> str:
    """Return one of the actions that the game listed last."""
    actions = re.findall(r"'(\[\w+\])'", text.rpartition("available actions are")[2])
    return str(rng.choice(actions or ["[check]"]))

"""Scores by which an evaluation is judged, and which of them an evaluation has."""

from __future__ import annotations

from collections.abc import Collection

# the names in eval/SET/SCORE, the most telling first; -1 where less is better
MAIN_SCORES = {"reward": 1, "loss": -1, "accuracy": 1, "token_accuracy": 1, "margin": 1}


def main_score(metrics: Collection[str]) -> str:
    """Return the most telling score over all sets among these metrics; "" if there is none."""
    return next((score for score in MAIN_SCORES if f"eval/{score}" in metrics), "")

"""Rejection sampling: which of a prompt's graded samples become supervised data. Pure Python."""

from __future__ import annotations

from typing import Literal

from spmd_rl.errors import ConfigError
from spmd_rl.types.groups import Group
from spmd_rl.types.samples import Sample

Keep = Literal["best", "correct"]


def accepted_samples(
    group: Group, *, keep: Keep = "correct", threshold: float = 1.0
) -> list[Sample]:
    """Return the samples to imitate: all correct ones, or of those the best.

    A sample is correct with a reward of `threshold` or more. Of equal rewards the first sample is
    the best. A sample that was cut off is never accepted, because it would be learned with an end.
    Of equal texts the first is accepted.
    """
    correct = [
        sample
        for sample in group.samples
        if sample.status == "completed" and sample.reward >= threshold
    ]
    if keep == "best":
        return [max(correct, key=lambda sample: sample.reward)] if correct else []
    if keep != "correct":
        raise ConfigError(f"keep must be best or correct, not {keep!r}")
    first_of_text: dict[str, Sample] = {}
    for sample in correct:
        first_of_text.setdefault(sample.text, sample)
    return [*first_of_text.values()]

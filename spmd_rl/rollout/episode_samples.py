"""Samples that episodes return: what a trainer could not take is cut off, or refused."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spmd_rl.hooks.results import BadResult
from spmd_rl.model.spec import ModelSpec
from spmd_rl.types.kept_sets import set_ends
from spmd_rl.types.samples import NO_VERSION, Sample


@dataclass(frozen=True)
class ModelLimits:
    """What a sequence may be: its tokens with those of the prompt, and the ids that there are."""

    context_tokens: int
    vocab_size: int

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelLimits:
        return cls(spec.max_positions, spec.vocab_size)

    def check_ids(self, tokens: NDArray[np.int32]) -> None:
        """Raises: BadResult for an id that is no token of the model."""
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self.vocab_size):
            raise BadResult(f"has token ids outside the model's vocabulary of {self.vocab_size}")

    def fitted(self, sample: Sample, num_prompt_tokens: int) -> Sample:
        """Return a sample that the trainer can take. One that is too long ends with its last drawn
        token, since nothing learns from what was observed after it.

        Raises: BadResult, the end of a sentence, for a sample that cannot be taken.
        """
        for ids in (sample.context, sample.tokens):
            self.check_ids(ids)
        if sample.kept and len(_ends_of_sets(sample)) != len(sample.tokens):
            raise BadResult("returned a sample that has no kept set for each token")
        if not sample.temperature > 0 or math.isinf(sample.temperature):
            raise BadResult(f"returned a sample of temperature {sample.temperature:g}")
        if math.isinf(sample.reward):
            raise BadResult(f"returned a sample whose reward is {sample.reward}")
        num_before = len(sample.context) or num_prompt_tokens
        room = self.context_tokens - num_before
        if len(sample.tokens) > room:
            sample = _without_tail(sample)
        if len(sample.tokens) > room:
            raise BadResult(
                f"returned a sample of {len(sample.tokens)} tokens after a prompt of "
                f"{num_before}, but the model's context is {self.context_tokens}"
            )
        return sample


def _without_tail(sample: Sample) -> Sample:
    """Return the sample up to the last token that was drawn, or that is learned from."""
    counts = np.flatnonzero((sample.versions != NO_VERSION) | sample.mask)
    length = int(counts[-1]) + 1 if len(counts) else 0
    if not length:
        return sample
    return sample.with_data(sample.data.cut(0, length), mask=sample.mask[:length])


def _ends_of_sets(sample: Sample) -> NDArray[np.int64]:
    return set_ends(np.frombuffer(sample.kept, np.uint8))

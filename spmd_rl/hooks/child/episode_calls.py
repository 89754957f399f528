"""Calls of `generate` in their process: what a message asks for, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from spmd_rl.errors import ContractError
from spmd_rl.hooks.child.loaded import LoadedHooks
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.results import BadResult, preview
from spmd_rl.hooks.wire.messages import EpisodeResult, Episodes
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

STATUSES = ("completed", "truncated")  # of a sample that an episode returns


class EpisodeCall(NamedTuple):
    """One episode: its prompt, and which sample of how many it is."""

    call_id: int
    prompt: Prompt
    sample_index: int
    num_samples: int
    temperature: float
    context: HookContext

    def answer(self, result: Any, seconds: float) -> EpisodeResult:
        """Return the answer to the call. Raises: BadResult."""
        samples = self._samples_of(result)
        if len(samples) > 1:
            samples = [sample.replace(execution=self.sample_index) for sample in samples]
        try:
            columns = Sample.to_columns(samples)
        except (ContractError, TypeError, ValueError) as error:
            raise BadResult(f"returned a sample that does not fit: {error}") from error
        return EpisodeResult(
            self.call_id, seconds, columns, self.context.metrics, self.context.notes
        )

    def _samples_of(self, result: Any) -> list[Sample]:
        """Return the samples that the episode returned. Raises: BadResult."""
        samples = [result] if isinstance(result, Sample) else result
        if not isinstance(samples, list) or not all(isinstance(one, Sample) for one in samples):
            raise BadResult(f"returned no Sample and no list of them: {preview(result)}")
        if not samples:
            raise BadResult("returned no sample")
        if len({sample.index for sample in samples}) < len(samples):
            raise BadResult("returned two samples of one transcript")
        for sample in samples:
            self._check(sample)
        return samples

    def _check(self, sample: Sample) -> None:
        if sample.prompt_uid != self.prompt.uid:
            raise BadResult(f"returned a sample of another prompt, {preview(sample.prompt_uid)}")
        if (sample.index - self.sample_index) % self.num_samples:
            raise BadResult(f"returned a sample of another episode, {preview(sample.index)}")
        if len(sample.tokens) == 0 or not np.isfinite(sample.logprobs).all():
            raise BadResult("returned a sample without tokens, or without their log-probs")
        if sample.status not in STATUSES:
            raise BadResult(f"returned a sample of the status {preview(sample.status)}")


def episodes_of(message: Episodes, hooks: LoadedHooks) -> Iterator[EpisodeCall]:
    """Yield the episodes of a message, in order."""
    prompts = message.prompts.rows()
    for call_id, info, number, index, num_samples, temperature in zip(
        message.ids,
        message.infos,
        message.prompt_of,
        message.indices,
        message.num_samples,
        message.temperatures,
        strict=True,
    ):
        prompt = prompts[number]
        context = hooks.context(info, prompt.uid, index)
        yield EpisodeCall(call_id, prompt, index, num_samples, temperature, context)

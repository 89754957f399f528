"""Calls of hooks in their process: what a message asks for, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from spmd_rl.errors import ContractError
from spmd_rl.hooks.context import CallInfo, HookContext, KeptResults
from spmd_rl.hooks.program import EpisodeProgram
from spmd_rl.hooks.results import BadResult, as_grade, as_grades, preview
from spmd_rl.hooks.signatures import RewardFunction, load_generate, load_reward
from spmd_rl.hooks.wire.messages import Calls, Episode, KeepResult, Result, Start
from spmd_rl.rewards.ready import check_graders, checked_graders
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

STATUSES = ("completed", "truncated")  # of a sample that an episode returns


class RewardCall(NamedTuple):
    """One call of a reward function: the prompt, and the sample or samples."""

    call_id: int
    reward: RewardFunction
    prompt: Prompt
    samples: Sequence[Sample]
    context: HookContext | None  # where the function takes one

    @property
    def function(self) -> Callable[..., Any]:
        return self.reward.function

    def start(self) -> Any:
        """Call the function; what it returns is its result, or a coroutine."""
        subject = self.samples if self.reward.form.whole_group else self.samples[0]
        if self.context is None:
            return self.reward.function(self.prompt, subject)
        return self.reward.function(self.context, self.prompt, subject)

    def again(self) -> RewardCall:
        """Return the call as it was before it was made."""
        context = self.context and replace(self.context, metrics={}, notes={})
        return self._replace(context=context)

    def answer(self, result: Any, seconds: float) -> Result:
        """Return the answer to the call. Raises: BadResult."""
        is_group, context = self.reward.form.whole_group, self.context
        grades = as_grades(result, len(self.samples)) if is_group else [as_grade(result)]
        if context is None:
            return Result(self.call_id, seconds, grades)
        return Result(self.call_id, seconds, grades, context.metrics, context.notes)


class EpisodeCall(NamedTuple):
    """One call of `generate`: its prompt, and which sample of how many it makes."""

    call_id: int
    function: Callable[..., Any]
    prompt: Prompt
    sample_index: int
    num_samples: int
    temperature: float
    context: HookContext

    def answer(self, result: Any, seconds: float) -> Result:
        """Return the answer to the call. Raises: BadResult."""
        samples = self._samples_of(result)
        if len(samples) > 1:
            samples = [sample.replace(execution=self.sample_index) for sample in samples]
        try:
            columns = Sample.to_columns(samples)
        except (ContractError, TypeError, ValueError) as error:
            raise BadResult(f"returned a sample that does not fit: {error}") from error
        told = self.context.metrics, self.context.notes
        return Result(self.call_id, seconds, [], *told, samples=columns)

    def _samples_of(self, result: Any) -> list[Sample]:
        """Return the samples that the episode returned. Raises: BadResult."""
        samples = [result] if isinstance(result, Sample) else result
        if not isinstance(samples, list) or not all(isinstance(one, Sample) for one in samples):
            raise BadResult(f"returned no Sample and no list of them: {preview(result)}")
        if not samples:
            raise BadResult("returned no sample")
        if len({one.index for one in samples}) < len(samples):
            raise BadResult("returned two samples of one transcript")
        for one in samples:
            if one.prompt_uid != self.prompt.uid:
                raise BadResult(f"returned a sample of another prompt, {preview(one.prompt_uid)}")
            if (one.index - self.sample_index) % self.num_samples:
                raise BadResult(f"returned a sample of another episode, {preview(one.index)}")
            if len(one.tokens) == 0 or not np.isfinite(one.logprobs).all():
                raise BadResult("returned a sample without tokens, or without their log-probs")
            if one.status not in STATUSES:
                raise BadResult(f"returned a sample of the status {preview(one.status)}")
        return samples


@dataclass(frozen=True)
class LoadedHooks:
    """The functions of a process, and the recipe's config, which they find in their context."""

    rewards: list[RewardFunction]
    program: EpisodeProgram | None
    config: Mapping[str, Any]

    @staticmethod
    def of(start: Start) -> LoadedHooks:
        """Import the hooks. Raises: ConfigError when one cannot be used."""
        rewards = [load_reward(name) for name in start.rewards]
        if names := checked_graders(start.rewards):
            from spmd_rl.rewards.config import graders_of  # most hooks do not need it

            check_graders(names, graders_of(start.config), start.deadline_s)
        program = load_generate(start.generate) if start.generate else None
        return LoadedHooks(rewards, program, start.config)

    def reward_calls(self, message: Calls) -> Iterator[RewardCall]:
        """Yield the calls of a message, in order. Arrays are read-only, for the next function."""
        for columns in (message.prompts, message.samples):
            for name in columns.__match_args__:
                value = getattr(columns, name)
                for array in value.values() if isinstance(value, dict) else [value]:
                    if isinstance(array, np.ndarray):
                        array.setflags(write=False)
        prompts, samples = message.prompts.rows(), message.samples.rows()
        for call in message.calls:
            reward, prompt, first = (
                self.rewards[call.function],
                prompts[call.prompt],
                call.first_sample,
            )
            context = None
            if reward.form.takes_context:
                index = 0 if reward.form.whole_group else samples[first].index
                context = self._context(call.info, prompt.uid, index)
            own = samples[first : first + call.num_samples]
            yield RewardCall(call.call_id, reward, prompt, own, context)

    def episode_call(self, message: Episode, send: Callable[[KeepResult], None]) -> EpisodeCall:
        """Return the call that a message asks for. `send` tells the rank what it keeps."""
        assert self.program is not None
        (prompt,) = message.prompts.rows()
        context = self._context(message.info, prompt.uid, message.index)
        kept = KeptResults(
            message.results, lambda name, value: send(KeepResult(message.call_id, name, value))
        )
        context = replace(context, kept=kept)
        which = message.index, message.num_samples, message.temperature
        return EpisodeCall(message.call_id, self.program.play, prompt, *which, context)

    def _context(self, info: CallInfo, prompt_uid: int, sample_index: int) -> HookContext:
        which = info.step, info.version, info.evaluation, info.seed
        return HookContext(self.config, *which, prompt_uid, sample_index)

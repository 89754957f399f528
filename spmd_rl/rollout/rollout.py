"""The Rollout role: prompts in, graded groups of samples out.

The controller imports this module too, for the endpoints. So torch is imported by the instance, on
workers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from spmd_rl.controller.endpoint import Role, Sharded, collective
from spmd_rl.data.eos import end_ids
from spmd_rl.errors import DataError, SpmdError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.observe.trace import now_ns
from spmd_rl.rewards.grade import Grader
from spmd_rl.rewards.load import resolve_reward
from spmd_rl.rollout.engine import Engine, EngineConfig, Request, SamplingConfig
from spmd_rl.types.samples import Group, Prompt, Sample

if TYPE_CHECKING:
    from spmd_rl.weights.local_tensors import LocalTensors

MIN_SPAN_NS = 1_000_000  # of grading; shorter spans are left out of the trace


class Rollout(Role):
    """One engine a rank, each with the whole model; prompts are spread over the data axis."""

    def __init__(self, cfg: EngineConfig, context: RoleContext) -> None:
        super().__init__(cfg, context)
        self.tokenizer = load_tokenizer(cfg.model)
        self.grader = (
            Grader(resolve_reward(cfg.reward), cfg.reward_deadline_s) if cfg.reward else None
        )
        from spmd_rl.rollout.native.build import build

        self.engine: Engine = build(cfg, context.device, self._decode)
        known, vocab_size = self.tokenizer.model_ends, ModelSpec.from_folder(cfg.model).vocab_size
        self._more_ends = tuple(
            one for one in end_ids(self.tokenizer) if one not in known and one < vocab_size
        )

    @collective
    def generate(
        self, prompts: Sharded[list[Prompt]], sampling: SamplingConfig
    ) -> Sharded[list[Group]]:
        """Return all samples of all prompts, graded if there is a reward function.

        A sample whose grading fails ends the call, or is skipped if `on_reward_error` says so. If
        skipping leaves a group with a single sample, the group is emptied: one sample has nothing
        to be compared with.
        Blocks: until the last sample of this rank's prompts is finished, and for no other rank.
        """
        if self._more_ends and not sampling.ignore_eos:
            sampling = replace(sampling, stop_ids=sampling.stop_ids + self._more_ends)
        groups = {prompt.uid: Group(prompt, []) for prompt in prompts}
        if len(groups) < len(prompts):
            raise SpmdError(
                "two prompts of one call have the same uid, so their samples would be the same: "
                "give each prompt its own uid"
            )
        graded_before_s = self._graded_s()
        try:
            for prompt in prompts:
                for index in range(sampling.num_samples):
                    self.engine.submit(Request(prompt.uid, index, prompt.tokens, sampling))
            with self.grader or nullcontext():
                while self.engine.has_work:
                    if finished := self.engine.step().finished:
                        self._add_samples(finished, groups)
        finally:
            self.engine.abort()
        graded_s = self._graded_s() - graded_before_s
        return [replace(_sorted_group(group), graded_s=graded_s) for group in groups.values()]

    @collective
    def stats(self) -> Sharded[list[dict[str, int]]]:
        """Return the engine's counts, one entry a rank."""
        return [self.engine.stats()]

    @collective
    def sleep(self) -> None:
        """Give the KV memory back. Weights stay."""
        self.engine.sleep()

    @collective
    def wake(self) -> None:
        self.engine.wake()

    def numeric_contract(self) -> dict[str, str | int]:
        """Return the facts that the engine's bits depend on, besides the weights."""
        return self.engine.contract()

    def weight_sink(self) -> LocalTensors:
        """Return the target of a push: this engine's own parameters."""
        return self.engine.weights()

    def on_weights(self, version: int) -> None:
        """Note that the parameters now hold `version`, on every rank of the role."""
        self.engine.new_version(version)

    def outdate(self) -> None:
        """Note that the parameters are changed in place, so they have no version until the push."""
        self.engine.outdate()

    def _decode(self, tokens: tuple[int, ...]) -> str:
        return self.tokenizer.decode(list(tokens))

    def _graded_s(self) -> float:
        """Return the time that all samples so far have spent in the reward function."""
        return self.grader.spent_s if self.grader else 0.0

    def _add_samples(self, samples: Sequence[Sample], groups: dict[int, Group]) -> None:
        """Grade the samples that one step has finished, and add them to their groups.

        The engine waits meanwhile, so a long grading has a span in the trace.
        """
        began_ns = now_ns()
        for sample in samples:
            self._add_sample(sample, groups[sample.prompt_uid])
        if self.grader and (ended_ns := now_ns()) - began_ns >= MIN_SPAN_NS:
            self.context.trace.add("reward", began_ns, ended_ns, samples=len(samples))

    def _add_sample(self, sample: Sample, group: Group) -> None:
        """Add text and reward to a sample, and add it to its group."""
        sample = sample.changed(
            text=self.tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True)
        )
        try:
            if self.grader:
                sample = self.grader.grade(group.prompt, sample)
        except DataError as error:
            if self.cfg.on_reward_error == "raise":
                raise
            group.skipped.append(str(error))
        else:
            group.samples.append(sample)


def _sorted_group(group: Group) -> Group:
    """Return the group with its samples sorted, or without them if skipping has left only one."""
    samples = sorted(group.samples, key=lambda sample: sample.index)
    return replace(group, samples=[] if group.skipped and len(samples) < 2 else samples)

"""The Rollout role: prompts in, graded groups of samples out.

The controller imports this module too, for the endpoints: torch comes in with the instance, on
workers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from spmd_rl.config.rules import require
from spmd_rl.controller.capabilities import Contracted, Sleeper, WeightReceiver
from spmd_rl.controller.endpoint import Role, Sharded, collective
from spmd_rl.data.eos import eos_ids
from spmd_rl.errors import DataError, SpmdError
from spmd_rl.hooks.signatures import load_reward
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.observe.trace import now_ns
from spmd_rl.rewards.grade import Grader
from spmd_rl.rollout.engine import Engine, NativeEngineConfig, Request, SamplingConfig
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Group, Sample

if TYPE_CHECKING:
    from spmd_rl.weights.ends import WeightSink

# of an engine that has none; a run with run.exact refuses the pair with any trainer
UNPROMISED_CONTRACT: dict[str, str | int] = {"engine": "no promise of the trainer's bits"}
SHOWN_NS = 1_000_000  # the shortest grading that is worth a span in the trace


class Rollout(Role, WeightReceiver, Sleeper, Contracted):
    """One engine a rank, each with the whole model; prompts are spread over the data axis.

    `model` is a Hugging Face folder. `reward` is "module:function", called with (prompt, sample);
    without one, groups have no rewards. `seed` is that of the draws. `reserved_bytes` is GPU memory
    that the plan counts beside the engine's own; the controller passes it.
    """

    def __init__(
        self,
        cfg: NativeEngineConfig | SglangEngineConfig,
        context: RoleContext,
        model: str,
        seed: int,
        reward: str = "",
        reserved_bytes: int = 0,
    ) -> None:
        super().__init__(cfg, context)
        self.seed = seed
        self.tokenizer = load_tokenizer(model)
        self.grader = (
            Grader(load_reward(reward).function, cfg.reward_deadline_s) if reward else None
        )
        from spmd_rl.rollout.build import build_engine

        self.engine: Engine = build_engine(
            cfg, model, context, self._decode, seed=seed, reserved_bytes=reserved_bytes
        )
        known, vocab_size = self.tokenizer.config_eos_ids, ModelSpec.from_folder(model).vocab_size
        self._more_ends = tuple(
            one for one in eos_ids(self.tokenizer) if one not in known and one < vocab_size
        )

    @collective
    def generate(
        self, prompts: Sharded[list[Prompt]], sampling: SamplingConfig, seed: int | None = None
    ) -> Sharded[list[Group]]:
        """Return all samples of all prompts, graded where there is a reward function.

        `seed` stands in for the role's own, such as for an evaluation.
        A sample whose grading fails ends the call, or is skipped if `on_reward_error` says so. A
        group that this leaves with a single sample, which nothing compares with, is emptied.
        Blocks: until the last sample of this rank's prompts is finished; nobody else is waited for.
        """
        if self._more_ends and not sampling.ignore_eos:
            sampling = replace(sampling, stop_ids=sampling.stop_ids + self._more_ends)
        seed = self.seed if seed is None else seed
        require(0 <= seed < 1 << 63, "seed", seed, "in [0, 2^63)")
        groups = {prompt.uid: Group(prompt, []) for prompt in prompts}
        if len(groups) < len(prompts):
            raise SpmdError(
                "two prompts of one call have the same uid, so their samples would be drawn alike"
            )
        graded_before_s = self._graded_s()
        try:
            for prompt in prompts:
                for index in range(sampling.num_samples):
                    self.engine.submit(
                        Request(prompt.uid, index, prompt.tokens, sampling, seed=seed)
                    )
            with self.grader or nullcontext():
                while self.engine.has_work:
                    if finished := self.engine.step().finished:
                        self._file_all(finished, groups)
        finally:
            self.engine.abort()
        reward_time_s = self._graded_s() - graded_before_s
        return [
            replace(_comparable(group), reward_time_s=reward_time_s) for group in groups.values()
        ]

    @collective
    def stats(self) -> Sharded[list[dict[str, int]]]:
        """The engine's counts, one entry a rank."""
        return [self.engine.stats()]

    @collective
    def sleep(self) -> None:
        """Give the KV memory back; the weights of a native engine stay."""
        self.engine.sleep()

    @collective
    def wake(self) -> None:
        self.engine.wake()

    def numeric_contract(self) -> dict[str, str | int]:
        """What the engine's bits depend on, besides the weights."""
        contract = self.engine.contract()
        return UNPROMISED_CONTRACT if contract is None else contract

    def weight_sink(self) -> WeightSink:
        """Return where pushed weights go: this rank's engine."""
        return self.engine.sink()

    def _decode(self, tokens: tuple[int, ...]) -> str:
        return self.tokenizer.decode(list(tokens))

    def _graded_s(self) -> float:
        """What all samples so far have spent in the reward function."""
        return self.grader.reward_time_s if self.grader else 0.0

    def _file_all(self, samples: Sequence[Sample], groups: dict[int, Group]) -> None:
        """File what one step of the engine has finished, which waits meanwhile: what takes long is
        in the trace.
        """
        began_ns = now_ns()
        for sample in samples:
            self._file(sample, groups[sample.prompt_uid])
        if self.grader and (ended_ns := now_ns()) - began_ns >= SHOWN_NS:
            self.context.trace.add("reward", began_ns, ended_ns, samples=len(samples))

    def _file(self, sample: Sample, group: Group) -> None:
        """Complete a sample with its text and reward, and put it into its group."""
        sample = sample.replace(
            text=self.tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True)
        )
        try:
            if self.grader:
                sample = self.grader.grade(group.prompt, sample)
        except DataError as error:
            if self.cfg.on_reward_error == "raise":
                raise
            failed = sample.replace(status="failed", metadata={"error": str(error)})
            group.failed.append(failed)
        else:
            group.samples.append(sample)


def _comparable(group: Group) -> Group:
    """The group in the order of its samples; without them if only a single one has not failed."""
    samples = sorted(group.samples, key=lambda sample: sample.index)
    return replace(group, samples=[] if group.failed and len(samples) < 2 else samples)

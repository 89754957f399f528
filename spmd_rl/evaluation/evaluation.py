"""Evaluation of a run's weights on held-out sets, at the steps that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spmd_rl.controller.controller import Controller
from spmd_rl.controller.link import Link
from spmd_rl.data.prompts import Prompts
from spmd_rl.evaluation.config import EvaluatedRecipe, ResolvedSet, resolve_sets
from spmd_rl.evaluation.schedule import EvalSchedule
from spmd_rl.evaluation.scores import metrics_of_sets, scores
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.rollout.rollout import Rollout
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import FIRST_EVALUATED, Prompt

SAMPLES_PER_CALL = 2048  # what engines are given at once

Grade = Callable[[list[Group]], list[Group]]
Bear = Callable[[list[Group]], None]


class Evaluation:
    """Evaluates the weights that the engine has, and records scores and samples.

    The run begins after `first` steps and ends after `num_steps`. `grade` gives rewards to the
    samples of a set without a reward function. `bear` is called with the groups of each set, once
    they are recorded, and raises where too many of their episodes have failed. The draws depend on
    `eval.seed` alone, so training goes on as if there were no evaluation.
    Raises: DataError or ConfigError in the constructor for a set that cannot be read.
    """

    def __init__(
        self,
        ctl: Controller,
        cfg: EvaluatedRecipe,
        rollout: Rollout,
        num_steps: int,
        grade: Grade | None = None,
        *,
        first: int = 0,
        bear: Bear | None = None,
    ) -> None:
        self._ctl = ctl
        self._seed = cfg.eval.seed
        self._rollout = rollout
        self._schedule = EvalSchedule(cfg.eval, ctl.run_folder, num_steps, first)
        self._grade, self._bear = grade, bear
        sets = resolve_sets(cfg.eval, cfg.sampling, cfg.prompts)
        self._sets = [(one, prompts_of(one, load_tokenizer(cfg.model))) for one in sets]
        ctl.plan_evaluations(self._schedule, [one.name for one in sets])

    def after(self, num_steps: int) -> None:
        """Evaluate if that is due after `num_steps` train steps. Call it after the push of the
        weights, before anything is generated with them.

        Blocks: until all samples are graded.
        """
        if self._sets and self._schedule.is_due(num_steps):
            self.run(num_steps)

    def at_end(self, trainer: Trainer, weights: Link, *, drain: bool = True) -> None:
        """Push the last weights and evaluate them, if that is due. Call it after the loop.

        `drain` is that of the push.
        """
        num_steps = min(self._schedule.num_steps, self._ctl.num_done)
        if self._sets and self._schedule.is_due_at_end(num_steps):
            with self._ctl.phase("sync"):
                weights.push(version=num_steps, drain=drain)
            self.run(num_steps)

    def run(self, num_steps: int) -> dict[str, dict[str, float]]:
        """Evaluate and record now, and return the scores of each set by its name.

        The weights had `num_steps` train steps. Raises: what `bear` raises.
        """
        groups = {one.name: self._groups(one, prompts, num_steps) for one, prompts in self._sets}
        found = {
            one.name: scores(groups[one.name], one.sampling.num_samples, one.threshold)
            for one, _ in self._sets
        }
        self._ctl.record_evaluation(num_steps, metrics_of_sets(found), groups)
        for of_set in groups.values():
            if self._bear is not None:
                self._bear(of_set)
        return found

    def _groups(self, one: ResolvedSet, prompts: Sequence[Prompt], num_steps: int) -> list[Group]:
        """Return the graded samples of a set."""
        groups: list[Group] = []
        for asked in _parts(prompts, max(1, SAMPLES_PER_CALL // one.sampling.num_samples)):
            with self._ctl.phase("eval"):
                groups += self._rollout.generate.call(
                    asked, one.sampling, seed=self._seed, step=num_steps, evaluation=True
                )
        if self._grade is None or one.reward:
            return groups
        with self._ctl.phase("grade"):
            return self._grade(groups)


def prompts_of(one: ResolvedSet, tokenizer: Any) -> list[Prompt]:
    """Return all prompts of a set, in the order of its file.

    A prompt that names its own reward functions keeps them. Raises: DataError, ConfigError.
    """
    prompts = Prompts(one.data, one.prompts, tokenizer, one.sampling)
    return [
        prompt.replace(uid=FIRST_EVALUATED + number, reward=prompt.reward or one.reward)
        for number, prompt in enumerate(prompts.take(len(prompts)))
    ]


def _parts(prompts: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
    for first in range(0, len(prompts), size):
        yield list(prompts[first : first + size])

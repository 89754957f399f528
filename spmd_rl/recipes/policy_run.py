"""PolicyRun: the roles of a recipe that learns from its own samples, and what it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from spmd_rl.check.engine import announce_correction
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.run.steps import LoopStep
from spmd_rl.environments.failures import refuse_failures
from spmd_rl.evaluation.evaluation import Evaluation, Grade
from spmd_rl.recipes.configs import PolicyRecipe
from spmd_rl.recipes.load_prompts import load_prompts
from spmd_rl.recipes.num_steps import first_step, num_steps
from spmd_rl.recipes.policy_update import PolicyUpdate
from spmd_rl.recipes.rollout_settings import rollout_settings
from spmd_rl.rollout.engine_load import load_metrics
from spmd_rl.rollout.group_sampler import GroupSampler
from spmd_rl.rollout.rollout import Rollout
from spmd_rl.train.trainer import Trainer


class PolicyRun:
    """The parts of a recipe that learns from its own samples, made from its config.

    `trainer`, `update` (which has the reference and the critic), `rollout`, `weights` (the link
    between trainer and rollout), `prompts`, `num_steps` and `evaluation`. Roles take memory: those
    of the update are made before the engine. A hook that leaves groups out is used where a sampler
    can replace them, so not with `replaces_groups = false`. `grade` is that of `Evaluation`.

    Raises: ConfigError, DataError.
    """

    def __init__(
        self,
        ctl: Controller,
        cfg: PolicyRecipe,
        grade: Grade | None = None,
        *,
        replaces_groups: bool = True,
    ) -> None:
        roles = ctl.world.split(cfg.split)
        keep_group = cfg.hooks.keep_group if replaces_groups else ""
        self._ctl = ctl
        self._cfg = cfg
        self.trainer = ctl.spawn(Trainer, cfg.trainer, on=roles.train, model=cfg.model)
        self.update = PolicyUpdate(ctl, cfg, self.trainer, roles, keep_group=keep_group)
        self.rollout = ctl.spawn(Rollout, cfg.engine, on=roles.infer, **rollout_settings(cfg))
        self.weights = ctl.link(self.trainer, self.rollout)
        self.prompts = load_prompts(cfg)
        self.num_steps = num_steps(cfg, self.prompts, cfg.prompts_per_step)
        announce_correction(cfg.engine, cfg.correction_in_words, cfg.trainer)
        self.evaluation = Evaluation(
            ctl,
            cfg,
            self.rollout,
            self.num_steps,
            grade,
            first=cfg.start_step,
            bear=partial(refuse_failures, cfg=cfg.agent),
        )

    def sampler(self) -> GroupSampler:
        """Return a sampler that replaces the groups that the update, or a hook, leaves out."""
        return GroupSampler(
            self.rollout,
            self.prompts,
            self._cfg.sampling,
            self._cfg.sampler,
            groups_per_step=self._cfg.prompts_per_step,
            keep=self.update.keep,
        )

    def steps(self, **source: Any) -> Iterator[LoopStep]:
        """Load the newest checkpoint, and yield the steps that are left.

        `source` names what the groups come from, which checkpoints hold too: `sampler`, or by
        default `prompts`.
        Blocks: until every role has loaded. Raises: as `Controller.resume` and `.steps` do.
        """
        parts = source or {"prompts": self.prompts}
        cfg = self._cfg
        start = self._ctl.resume(trainer=self.trainer, **parts, **self.update.savers)
        start = first_step(cfg, start, self.update.trainers, self.prompts, cfg.prompts_per_step)
        return self._ctl.steps(self.num_steps, start)

    def engine_metrics(self) -> dict[str, float]:
        """Return how busy the engines were since the last call, evaluations included.

        Blocks: until every engine has told.
        """
        return load_metrics(self.rollout.take_load.call())

    def finish(self, *, drain: bool = True) -> None:
        """Export the model, and evaluate the last weights.

        With `drain` their push waits for the answers that are being generated.
        """
        self.trainer.export_hf.call(str(self._ctl.run_folder / "hf"))
        self.evaluation.at_end(self.trainer, self.weights, drain=drain)

"""Policy update of a recipe: from graded groups to one train step of the chosen algorithm."""

from __future__ import annotations

from typing import Any

from spmd_rl.algo.algorithm import Algorithm
from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.make import make_algorithm
from spmd_rl.controller.controller import Controller
from spmd_rl.mesh.split import Placement
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.samples import Group


class PolicyUpdate:
    """The algorithm of a recipe at work: its settings, and the roles that it needs."""

    def __init__(self, ctl: Controller, cfg: Any, trainer: Trainer, *, on: Placement) -> None:
        self.algorithm = algorithm_of(cfg, cfg.sampling)
        self.trainer = trainer
        self.savers: dict[str, Any] = {}

    def step(self, groups: list[Group], index: int) -> dict[str, float]:
        """Learn from the groups of step `index`, and return the metrics."""
        batch = self.algorithm.pack(groups)
        if self.algorithm.credit is not None:
            batch = self.algorithm.credit(batch)
        return self.trainer.train_step.call(
            batch, self.algorithm.loss, needs=self.algorithm.loss_needs
        )


def algorithm_of(cfg: PolicyConfig, sampling: SamplingConfig) -> Algorithm:
    """Return the algorithm of a recipe. Raises: ConfigError for settings that do not fit."""
    return make_algorithm(
        cfg, num_samples=sampling.num_samples, max_response_tokens=sampling.max_tokens
    )

"""The ValueTrainer role: a model with a value head, which is PPO's critic or a reward model."""

from __future__ import annotations

from typing import ClassVar

from spmd_rl.controller.endpoint import Sharded, collective
from spmd_rl.model.spec import Head
from spmd_rl.train.training_role import MASTER, TrainingRole
from spmd_rl.types.batch import Batch
from spmd_rl.types.token_values import SequenceValues, TokenValues


class ValueTrainer(TrainingRole):
    """Trains a model that gives a number for each state, with losses that take a `ValueInput`.

    `model` may be the folder of a language model, whose head is left out. The value head is then
    zero at first, so that all values are 0.
    """

    HEAD: ClassVar[Head] = "value"

    @collective
    def values(self, batch: Sharded[Batch]) -> Sharded[TokenValues]:
        """Return the value of the state before each token of the mask."""
        self.memory.require("values", MASTER)
        return self.learner.runner.values(batch)

    @collective
    def rewards(self, batch: Sharded[Batch]) -> Sharded[SequenceValues]:
        """Return the value of the state after each sequence, as a reward model does.

        To train such a model, give `train_step` the batch `sequence_ends(batch)`.
        """
        self.memory.require("rewards", MASTER)
        return self.learner.runner.rewards(batch)


Critic = ValueTrainer  # as PPO calls it

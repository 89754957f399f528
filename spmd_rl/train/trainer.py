"""The Trainer role: a language model on some ranks of the world, which learns from batches."""

from __future__ import annotations

from typing import ClassVar

from spmd_rl.controller.endpoint import Sharded, collective
from spmd_rl.errors import ContractError
from spmd_rl.model.spec import Head
from spmd_rl.train.training_role import ALL_WEIGHTS, TrainingRole
from spmd_rl.types.batch import Batch
from spmd_rl.types.token_values import TokenValues, TopLogprobs


class Trainer(TrainingRole):
    """Trains a language model, such as the policy."""

    HEAD: ClassVar[Head] = "lm"

    @collective
    def top_logprobs(self, batch: Sharded[Batch], k: int) -> Sharded[TopLogprobs]:
        """Return the `k` likeliest tokens before each token of the mask, and their log-probs."""
        return self.learner.runner.top_logprobs(batch, k)

    @collective
    def score(self, batch: Sharded[Batch]) -> Sharded[TokenValues]:
        """Return the log-probabilities of the batch's tokens under the current weights."""
        self.memory.require("score", *ALL_WEIGHTS)
        return self.learner.runner.score(batch)

    @collective
    def score_base(self, batch: Sharded[Batch]) -> Sharded[TokenValues]:
        """Return the log-probabilities under the base alone, with the adapters switched off.

        Raises: ContractError for a trainer without adapters.
        """
        if not self.cfg.lora.rank:
            raise ContractError(
                "score_base is for a trainer of adapters: set trainer.lora.rank, or spawn a frozen "
                "model as the reference"
            )
        self.memory.require("score_base", *ALL_WEIGHTS)
        with self.backend.base_alone():
            return self.learner.runner.score(batch)

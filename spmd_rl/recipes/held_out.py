"""Evaluations of recipes without an engine: how well held-out tokens are predicted, and held-out
pairs ranked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.algo.packing import pack_sft
from spmd_rl.algo.pair_packing import pack_pairs
from spmd_rl.check.inputs import check_inputs
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.endpoint import Role
from spmd_rl.data.pairs import PreferencePairs
from spmd_rl.data.prompt_records import PromptConfig
from spmd_rl.data.render.turns import Learn
from spmd_rl.data.sft import SftPairs
from spmd_rl.evaluation.held_out import HeldOutEvaluation, batches_of
from spmd_rl.evaluation.held_out_config import HeldOutConfig, held_out_sets
from spmd_rl.evaluation.held_out_scores import (
    Measured,
    pair_measures,
    pair_scores,
    token_measures,
    token_scores,
)
from spmd_rl.recipes.configs import PairRecipe, SupervisedRecipe
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from spmd_rl.types.sft_pair import SftPair


def check_supervised(cfg: SupervisedRecipe, learn: Learn | None = None) -> None:
    """Check the model, and the data of the run and of each set. `learn` is as in `check_inputs`.

    Raises: ConfigError or DataError, which names the first thing to correct.
    """
    key = cfg.eval.FORMAT
    records = getattr(cfg, key)
    for data, own in [(cfg.data, records), *held_out_sets(cfg.eval, records).values()]:
        settings = {key: own, "learn": learn}
        check_inputs(model=cfg.model, data=data, trainer=cfg.trainer, **settings)


def held_out_answers(
    cfg: HeldOutConfig, prompts: PromptConfig, tokenizer: Any, learn: Learn
) -> dict[str, list[SftPair]]:
    """Return the sequences of each set. `prompts` and `learn` are those of the run.

    Raises: DataError or ConfigError for a set that cannot be read.
    """
    sets = {
        name: SftPairs(data, own, tokenizer, learn)
        for name, (data, own) in held_out_sets(cfg, prompts).items()
    }
    return {name: [*chain.from_iterable(pairs.all())] for name, pairs in sets.items()}


def token_evaluation(
    ctl: Controller,
    cfg: SupervisedRecipe,
    trainer: Trainer,
    sets: Mapping[str, Sequence[SftPair]],
    num_steps: int,
) -> HeldOutEvaluation:
    """Return the evaluation of loss, perplexity and token accuracy on these sets.

    `num_steps` are those of the whole run.
    """

    def measure(batch: Batch) -> Measured:
        return token_measures(
            batch, trainer.score.call(batch), trainer.top_logprobs.call(batch, 1).ids
        )

    batches = {name: batches_of(sequences, pack_sft) for name, sequences in sets.items()}
    return HeldOutEvaluation(
        ctl,
        cfg.eval,
        [trainer],
        batches,
        measure,
        token_scores,
        num_steps=num_steps,
        first=cfg.start_step,
    )


def pair_evaluation(
    ctl: Controller,
    cfg: PairRecipe,
    roles: Sequence[Role],
    tokenizer: Any,
    rewards_of: Callable[[Batch], NDArray[np.floating]],
    num_steps: int,
    *,
    for_reward_model: bool = False,
) -> HeldOutEvaluation:
    """Return the evaluation of how the pairs of the sets are ranked.

    `num_steps` are those of the whole run. `rewards_of` asks `roles` for the reward of each answer
    of a batch of `pack_pairs`. `for_reward_model` is that of `PreferencePairs`.
    Raises: DataError or ConfigError for a set that cannot be read.
    """
    batches = {}
    for name, (data, own) in held_out_sets(cfg.eval, cfg.prompts).items():
        pairs = PreferencePairs(data, own, tokenizer, for_reward_model=for_reward_model)
        batches[name] = batches_of(pairs.all(), pack_pairs)
    return HeldOutEvaluation(
        ctl,
        cfg.eval,
        roles,
        batches,
        lambda batch: pair_measures(rewards_of(batch)),
        pair_scores,
        num_steps=num_steps,
        first=cfg.start_step,
    )

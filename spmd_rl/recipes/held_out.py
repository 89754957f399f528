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
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.endpoint import Role
from spmd_rl.data.pairs import PreferencePairs
from spmd_rl.data.sft import SftPairs
from spmd_rl.evaluation.held_out import HeldOutEvaluation, batches_of
from spmd_rl.evaluation.held_out_config import held_out_sets
from spmd_rl.evaluation.held_out_scores import (
    Measured,
    pair_measures,
    pair_scores,
    token_measures,
    token_scores,
)
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from spmd_rl.types.sft_pair import SftPair


def held_out_answers(cfg: Any, tokenizer: Any) -> dict[str, list[SftPair]]:
    """Return the sequences of each set of `cfg.eval`.

    `cfg` is a recipe's config with `eval`, `prompts` and `learn`.
    Raises: DataError or ConfigError for a set that cannot be read.
    """
    sets = {
        name: SftPairs(data, prompts, tokenizer, cfg.learn)
        for name, (data, prompts) in held_out_sets(cfg.eval, cfg.prompts).items()
    }
    return {name: [*chain.from_iterable(pairs.all())] for name, pairs in sets.items()}


def token_evaluation(
    ctl: Controller,
    cfg: Any,
    trainer: Trainer,
    sets: Mapping[str, Sequence[SftPair]],
    num_steps: int,
) -> HeldOutEvaluation:
    """Return the evaluation of loss, perplexity and token accuracy on these sets.

    `cfg` is a recipe's config with `eval` and `start_step`. `num_steps` are those of the whole run.
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
    cfg: Any,
    roles: Sequence[Role],
    tokenizer: Any,
    rewards_of: Callable[[Batch], NDArray[np.floating]],
    num_steps: int,
    *,
    for_reward_model: bool = False,
) -> HeldOutEvaluation:
    """Return the evaluation of how the pairs of `cfg.eval` are ranked.

    `cfg` is a recipe's config with `eval`, `prompts` and `start_step`. `num_steps` are those of the
    whole run. `rewards_of` asks `roles` for the reward of each answer of a batch of `pack_pairs`.
    `for_reward_model` is that of `PreferencePairs`.
    Raises: DataError or ConfigError for a set that cannot be read.
    """
    batches = {}
    for name, (data, prompts) in held_out_sets(cfg.eval, cfg.prompts).items():
        pairs = PreferencePairs(data, prompts, tokenizer, for_reward_model=for_reward_model)
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

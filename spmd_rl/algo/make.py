"""Maker of algorithms: from settings to an `Algorithm`, or to a sentence on what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from spmd_rl.algo.algorithm import OLD_LOGPROBS, Algorithm, rewards_differ
from spmd_rl.algo.algorithms.cispo import cispo
from spmd_rl.algo.algorithms.dapo import dapo
from spmd_rl.algo.algorithms.dr_grpo import dr_grpo
from spmd_rl.algo.algorithms.gdpo import gdpo
from spmd_rl.algo.algorithms.grpo import grpo
from spmd_rl.algo.algorithms.gspo import gspo
from spmd_rl.algo.algorithms.ppo import ppo
from spmd_rl.algo.algorithms.reinforce_pp import reinforce_pp
from spmd_rl.algo.algorithms.reinforce_pp_baseline import reinforce_pp_baseline
from spmd_rl.algo.algorithms.rloo import rloo
from spmd_rl.algo.config import CorrectionConfig, PolicyConfig
from spmd_rl.algo.overlong import with_overlong_penalty
from spmd_rl.algo.policy.mean_weight import with_mean_weight_of_one
from spmd_rl.algo.refusals import refuse_wrong_settings
from spmd_rl.errors import ConfigError
from spmd_rl.types.batch import Batch
from spmd_rl.types.samples import Group

ALGORITHMS: dict[str, Callable[[PolicyConfig], Algorithm]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "ppo": ppo,
    "gdpo": gdpo,
}


def make_algorithm(
    cfg: PolicyConfig, *, num_samples: int | None = None, max_response_tokens: int | None = None
) -> Algorithm:
    """Return the algorithm that `cfg` chooses, with its settings.

    `num_samples` and `max_response_tokens` are those of the sampling; None leaves out what needs
    them. They are checked, shape the penalty on long answers, and divide with "const".
    Raises: ConfigError, which names the key, for settings that do not go together.
    """
    refuse_wrong_settings(cfg, num_samples)
    algorithm = replace(
        ALGORITHMS[cfg.algorithm](cfg),
        mask_truncated=cfg.mask_truncated,
        max_response_tokens=max_response_tokens,
    )
    if cfg.aggregation != "auto":
        algorithm = replace(algorithm, aggregation=cfg.aggregation)
    if cfg.drop_equal_groups is not None:
        keeps = rewards_differ if cfg.drop_equal_groups else None
        algorithm = replace(algorithm, keeps=keeps)
    if cfg.correction.mean_one:
        algorithm = _with_mean_one(cfg.correction, algorithm)
    return _with_penalty(cfg, algorithm) if cfg.overlong.buffer else algorithm


def _with_mean_one(cfg: CorrectionConfig, algorithm: Algorithm) -> Algorithm:
    """Return the algorithm whose correction weights have a mean of 1 over the batch."""
    scaled = partial(
        with_mean_weight_of_one, mode=cfg.mode, level=cfg.level, high=cfg.high, low=cfg.low
    )

    def credit(batch: Batch) -> Batch:
        return scaled(algorithm.credit(batch) if algorithm.credit else batch)

    return replace(algorithm, credit=credit, needs=algorithm.needs | {OLD_LOGPROBS})


def _with_penalty(cfg: PolicyConfig, algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with the penalty on long answers. Raises: ConfigError."""
    limit = algorithm.max_response_tokens
    if limit is None or cfg.overlong.buffer >= limit:
        raise ConfigError(
            f"overlong.buffer = {cfg.overlong.buffer}: expected less than sampling.max_tokens = "
            f"{limit}"
        )
    shape = partial(
        with_overlong_penalty,
        max_response_tokens=limit,
        buffer=cfg.overlong.buffer,
        penalty=cfg.overlong.penalty,
    )

    def advantage(groups: list[Group]) -> Any:
        return algorithm.advantage(shape(groups))

    return replace(algorithm, advantage=advantage)

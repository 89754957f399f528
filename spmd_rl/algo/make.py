"""Maker of algorithms: from settings to an `Algorithm`, or to a sentence on what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from spmd_rl.algo import algorithms
from spmd_rl.algo.agents import compared_by_agent
from spmd_rl.algo.algorithm import OLD_LOGPROBS, Algorithm, rewards_differ
from spmd_rl.algo.config import AlgorithmName, CorrectionConfig, PolicyConfig
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.algo.overlong import with_overlong_penalty
from spmd_rl.algo.policy.mean_weight import with_mean_weight_of_one
from spmd_rl.algo.refusals import LONG_BUFFER, of_algorithms, refuse_wrong_settings
from spmd_rl.config.combinations import refuse
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group

# the file of each algorithm by its name; it has its facts, and a function of its name
ALGORITHMS: dict[str, Any] = {name: getattr(algorithms, name) for name in get_args(AlgorithmName)}
_FACTS: dict[str, AlgorithmFacts] = {name: file.FACTS for name, file in ALGORITHMS.items()}
OF_ALGORITHMS = tuple(of_algorithms(_FACTS))


def make_algorithm(
    cfg: PolicyConfig, *, num_samples: int | None = None, max_response_tokens: int | None = None
) -> Algorithm:
    """Return the algorithm that `cfg` chooses, with its settings.

    `num_samples` and `max_response_tokens` are those of the sampling; None leaves out what needs
    them. They are checked, shape the penalty on long answers, and divide with "const".
    Raises: ConfigError, which names the key, for settings that do not go together.
    """
    refuse_wrong_settings(cfg, _FACTS[cfg.algorithm], OF_ALGORITHMS, num_samples)
    make: Callable[[PolicyConfig], Algorithm] = getattr(ALGORITHMS[cfg.algorithm], cfg.algorithm)
    algorithm = replace(
        make(cfg),
        mask_truncated=cfg.mask_truncated,
        max_response_tokens=max_response_tokens,
    )
    if _FACTS[cfg.algorithm].compares_samples and algorithm.advantage_of == "samples":
        algorithm = replace(algorithm, advantage=compared_by_agent(algorithm.advantage))
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
    limit = algorithm.max_response_tokens or 0
    refuse([LONG_BUFFER], {"overlong": cfg.overlong, "sampling.max_tokens": limit})
    shape = partial(
        with_overlong_penalty,
        max_response_tokens=limit,
        buffer=cfg.overlong.buffer,
        penalty=cfg.overlong.penalty,
    )

    def advantage(groups: list[Group]) -> Any:
        return algorithm.advantage(shape(groups))

    return replace(algorithm, advantage=advantage)

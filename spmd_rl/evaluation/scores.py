"""Scores of graded samples: mean reward, avg@n and unbiased pass@k. numpy only.

A prompt has n samples, of which c are correct: their reward is at least the threshold. Prompts
weigh alike, however many of their samples have failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from spmd_rl.algo.group_metrics import num_drawn_tokens
from spmd_rl.types.groups import Group

# scores whose mean over the sets is logged
MACRO = ("reward", "pass@1", "loss", "token_accuracy", "accuracy", "margin")


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that k of the samples, drawn without replacement, have a correct one.

    It is 1 - C(n - c, k) / C(n, k), the unbiased estimate of pass@k (arXiv:2107.03374). The
    quotient is a product of factors of at most 1, so nothing overflows.
    Raises: ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    n, c = num_samples, num_correct
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} correct samples among {n}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4 and so on, up to `limit`."""
    return [1 << i for i in range(limit.bit_length())]


def scores(groups: Sequence[Group], num_samples: int, threshold: float) -> dict[str, float]:
    """Return the scores of a set by their names, such as `reward` and `pass@4`.

    `reward_error` is the standard error of the mean reward over the prompts. Failed samples are
    counted, and are part of no other score. pass@k leaves out prompts with fewer than k samples
    that did not fail; a score without any prompt is left out.
    """
    graded = [group for group in groups if group.num_samples]
    failed = {"failed_samples": float(sum(len(group.failed) for group in groups))}
    if not graded:
        return failed
    samples = Group.to_columns(graded).samples
    means = np.array([group.rewards.mean() for group in graded])
    counts = [
        (group.num_samples, int(np.count_nonzero(group.rewards >= threshold))) for group in graded
    ]
    found = {"reward": float(means.mean())}
    if len(means) > 1:
        found["reward_error"] = float(means.std(ddof=1) / math.sqrt(len(means)))
    found[f"avg@{num_samples}"] = float(np.mean([c / n for n, c in counts]))
    for k in powers_of_two(num_samples):
        if chances := [pass_at_k(n, c, k) for n, c in counts if n >= k]:
            found[f"pass@{k}"] = float(np.mean(chances))
    return found | {
        "truncated": samples.status.count("truncated") / len(samples),
        "response_tokens_mean": num_drawn_tokens(samples) / len(samples),
        **failed,
    }


def metrics_of_sets(scores_of: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of an evaluation: `eval/NAME/SCORE`, and means over the sets.

    `eval/SCORE` is the mean over the sets, each of which weighs alike, of the scores in `MACRO`.
    """
    metrics: dict[str, float] = {}
    for score in MACRO:
        values = [found[score] for found in scores_of.values() if score in found]
        if values:
            metrics[f"eval/{score}"] = float(np.mean(values))
    for name, found in scores_of.items():
        metrics |= {f"eval/{name}/{score}": value for score, value in found.items()}
    return metrics

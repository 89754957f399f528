"""Metrics of the age of samples: how many versions behind the weights that learn from them."""

from __future__ import annotations

from spmd_rl.observe.metric import Metric

AGE_METRICS = (
    Metric(
        "version/lag_mean",
        "versions",
        "Mean token age",
        "mean age of the step's tokens, in weight versions",
    ),
    Metric(
        "version/lag_max",
        "versions",
        "Oldest token age",
        "age of the step's oldest token, in weight versions",
    ),
    Metric(
        "version/older_share",
        "",
        "Tokens of older weights",
        "share of the step's tokens that older weights than the trainer's drew",
    ),
    Metric(
        "version/masked_share",
        "",
        "Tokens too old to learn",
        "share of the tokens that mask_lag left out of the loss",
    ),
)

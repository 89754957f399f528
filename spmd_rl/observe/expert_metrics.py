"""Names of the metrics of mixtures of experts, with their units and meanings."""

from __future__ import annotations

from spmd_rl.observe.metric import Metric

EXPERT_METRICS = (
    Metric(
        "experts/max_load",
        "",
        "Largest load of an expert",
        "tokens of the expert with most, over the mean of its layer's; mean over layers",
    ),
    Metric(
        "experts/max_load_worst",
        "",
        "Largest load in the worst layer",
        "tokens of the expert with most, over the mean of its layer's; the largest of all layers",
    ),
    Metric(
        "experts/entropy",
        "",
        "Evenness of experts",
        "entropy of how tokens spread over a layer's experts, 1 if evenly; mean over layers",
    ),
    Metric(
        "experts/entropy_worst",
        "",
        "Evenness in the worst layer",
        "entropy of how tokens spread over a layer's experts, 1 if evenly; the least of all layers",
    ),
    Metric(
        "experts/unused",
        "",
        "Unused experts",
        "share of a layer's experts that no token of the step went to; mean over layers",
    ),
    Metric(
        "experts/unused_worst",
        "",
        "Unused experts in the worst layer",
        "share of a layer's experts that no token of the step went to; the largest of all layers",
    ),
    Metric(
        "experts/rerouted",
        "",
        "Routes that replay changed",
        "share of a layer's recorded choices that its router would have made otherwise; mean over "
        "layers",
    ),
    Metric(
        "experts/rerouted_worst",
        "",
        "Changed routes in the worst layer",
        "share of a layer's recorded choices that its router would have made otherwise; the "
        "largest of all layers",
    ),
    Metric(
        "experts/balance_loss",
        "",
        "Balance loss of experts",
        "loss that trainer.router_aux_loss_coef weighs; even loads give a token's experts",
    ),
)

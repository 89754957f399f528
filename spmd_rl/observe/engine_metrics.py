"""Metrics of engines: how many samples ran and waited in them, and what their caches saved."""

from __future__ import annotations

from spmd_rl.observe.metric import Metric

ENGINE_METRICS = (
    Metric(
        "rollout/waiting",
        "samples",
        "Waiting samples",
        "samples that waited for a place in an engine when the step had taken its own",
    ),
    Metric(
        "engine/running_mean",
        "samples",
        "Running samples, mean",
        "samples that an engine computes, mean over the steps of all engines",
    ),
    Metric(
        "engine/running_max",
        "samples",
        "Running samples, most",
        "most samples that one engine computed in one of its steps",
    ),
    Metric(
        "engine/waiting_mean",
        "samples",
        "Samples waiting in an engine, mean",
        "samples that wait for a place in their engine, mean over the steps of all engines",
    ),
    Metric(
        "engine/waiting_max",
        "samples",
        "Samples waiting in an engine, most",
        "most samples that waited in one engine after one of its steps",
    ),
    Metric(
        "engine/prefix_hits",
        "",
        "Prefix cache",
        "share of the tokens of new requests whose keys and values an engine had already",
    ),
    Metric(
        "engine/preemptions",
        "samples",
        "Evicted samples",
        "samples that engines put back into their queues, because no page was free for a token",
    ),
    Metric(
        "engine/recomputed_tokens",
        "tokens",
        "Tokens computed again",
        "tokens of samples that had begun, whose keys and values engines computed again",
    ),
    Metric(
        "engine/kv_clipped",
        "",
        "Clipped keys and values",
        "share of the elements of keys and values that were beyond the largest code of 8 bits",
    ),
)

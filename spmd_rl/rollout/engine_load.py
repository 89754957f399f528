"""Load of engines: how many requests ran and waited, what their prefix caches saved and lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

COUNTS = (
    "num_lookup_tokens",
    "num_hit_tokens",
    "num_preemptions",
    "num_recomputed_tokens",
    "num_coded",
    "num_clipped",
)


class EngineLoad(msgspec.Struct):
    """What one engine did in some of its steps.

    `running` and `waiting` are sums over the steps, and the others the most in one step. Of the
    tokens of the requests that began, `num_lookup_tokens`, the prefix cache had `num_hit_tokens`.
    `num_preemptions` counts the requests that were evicted, and `num_recomputed_tokens` the tokens
    of requests that had begun before and whose keys and values were computed again.
    Of the `num_coded` elements of keys and values that became codes of 8 bits, `num_clipped` were
    beyond the largest code. An engine that does not know a pair has 0 of both.
    """

    num_steps: int = 0
    running: int = 0
    waiting: int = 0
    max_running: int = 0
    max_waiting: int = 0
    num_lookup_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_coded: int = 0
    num_clipped: int = 0


class LoadMeter:
    """Measures the load of one engine, from one `take` to the next."""

    def __init__(self) -> None:
        self._load = EngineLoad()
        self._before: dict[str, int] = {}

    def add_step(self, num_running: int, num_waiting: int) -> None:
        """Count a step of the engine, in which so many requests ran, and so many wait after it."""
        load = self._load
        load.num_steps += 1
        load.running += num_running
        load.waiting += num_waiting
        load.max_running = max(load.max_running, num_running)
        load.max_waiting = max(load.max_waiting, num_waiting)

    def take(self, stats: Mapping[str, int]) -> EngineLoad:
        """Return the load since the last call; `stats` are the engine's counts since its start."""
        load, self._load = self._load, EngineLoad()
        for name in COUNTS:
            total = stats.get(name, 0)
            setattr(load, name, total - self._before.get(name, 0))
            self._before[name] = total
        return load


def load_metrics(loads: Iterable[EngineLoad]) -> dict[str, float]:
    """Return the metrics of a step, of which each engine has told its load.

    Means are over the steps of all engines. What no engine knows is left out.
    """
    busy = [one for one in loads if one.max_running or one.max_waiting]
    if not busy:
        return {}
    num_steps = sum(one.num_steps for one in busy)
    metrics: dict[str, float] = {
        "engine/running_mean": sum(one.running for one in busy) / num_steps,
        "engine/running_max": max(one.max_running for one in busy),
        "engine/waiting_mean": sum(one.waiting for one in busy) / num_steps,
        "engine/waiting_max": max(one.max_waiting for one in busy),
    }
    if num_tokens := sum(one.num_lookup_tokens for one in busy):
        hits = sum(one.num_hit_tokens for one in busy)
        metrics["engine/prefix_hits"] = hits / num_tokens
        metrics["engine/preemptions"] = sum(one.num_preemptions for one in busy)
        metrics["engine/recomputed_tokens"] = sum(one.num_recomputed_tokens for one in busy)
    if num_coded := sum(one.num_coded for one in busy):
        metrics["engine/kv_clipped"] = sum(one.num_clipped for one in busy) / num_coded
    return metrics

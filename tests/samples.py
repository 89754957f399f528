"""What an engine makes of requests, for tests on CPUs and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_rl.rollout.engine import Engine, Request
from spmd_rl.types.samples import Sample

Samples = dict[tuple[int, int], Sample]  # by prompt and index


def finish(engine: Engine, requests: Sequence[Request] = ()) -> Samples:
    """Submit, then step until nothing is left."""
    for request in requests:
        engine.submit(request)
    samples = {}
    while engine.has_work:
        samples |= {(sample.prompt_uid, sample.index): sample for sample in engine.step().finished}
    return samples

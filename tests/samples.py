"""What an engine makes of requests, for tests on CPUs and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spmd_rl.kernels.vocab.kept_sets import KeptSets
from spmd_rl.rollout.engine import Engine, Request
from spmd_rl.types.kept_sets import set_ends
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


def words_of(samples: Sequence[Sample], vocab_size: int, device: torch.device) -> Tensor:
    """Return the sets over which the log-probs of all the samples' tokens are taken.

    A sample without filters has the whole vocabulary. Shape: [tokens, words] int32.
    """
    sets = b"".join(sample.kept or bytes(len(sample.tokens)) for sample in samples)
    data = np.frombuffer(bytearray(sets), np.uint8)
    ends = set_ends(data)
    arrays = data, np.concatenate([[0], ends[:-1]]), ends
    kept = KeptSets(*(torch.from_numpy(array).to(device) for array in arrays))
    return kept.words(slice(None), vocab_size)

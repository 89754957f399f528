"""Draw of the next tokens of running requests, with the sampling that all engines have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from spmd_rl.kernels import sample_and_score, stream_bases
from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.kernels.vocab.kept_sets import encoded_rows
from spmd_rl.kernels.vocab.kept_words import KeptRows
from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.native.sampled_tokens import SampledOnDevice, SampledOnHost, SampledTokens

DTYPES = {"top_k": np.int64, "top_p": np.float32, "min_p": np.float32}


def draw(asked: Sequence[Request], logits: Tensor) -> SampledOnHost:
    """Return a token of each request, its log-prob, and what its filters kept.

    Shape: logits [M, V].
    """
    device, settings = logits.device, [one.sampling for one in asked]

    def column(values: Iterable[Any], dtype: type) -> Tensor:
        return upload(np.array(list(values), dtype), device)

    filters, kept = dict[str, Tensor](), None
    if any(one.truncation for one in settings):
        for name, dtype in DTYPES.items():
            filters[name] = column((getattr(one, name) for one in settings), dtype)
        replays = column((one.replays for one in settings), np.bool_)
        kept = KeptRows.empty(replays, logits.shape[1])
    greedy = column((one.temperature == 0 for one in settings), np.bool_)
    keys = np.array([(one.seed, one.uid, one.index) for one in asked], np.int64)
    tokens, logprobs = sample_and_score(
        logits,
        column(
            (np.float32(1) / np.float32(one.scored_temperature) for one in settings), np.float32
        ),
        upload(stream_bases(*keys.T), device),
        column((len(one.past) for one in asked), np.int64),
        greedy=greedy if greedy.any() else None,
        kept=kept,
        **filters,
    )
    encoded = None if kept is None else encoded_rows(kept, logits.shape[1])
    return SampledTokens(SampledOnDevice(tokens, logprobs, encoded), device).wait()

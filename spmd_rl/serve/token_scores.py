"""Scores of a text by a served model: log-probs of its tokens, and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from spmd_rl.errors import DataError
from spmd_rl.gateway.dialects.request import TokenScores
from spmd_rl.kernels import PackedAttention, token_scores
from spmd_rl.rollout.native.engine import NativeEngine

LOGIT_ROWS = 512  # that exist at once


@torch.inference_mode()
def score(
    engine: NativeEngine, tokens: NDArray[np.int32], first: int, num_top: int, temperature: float
) -> TokenScores:
    """Return the scores of the tokens from `first` on, at a temperature and over all tokens.

    The whole text is computed at once, so it must fit into a step. Its log-probs have the bits of
    those that the engine records.
    Raises: DataError for a longer text.
    """
    most = engine.sizes.max_step_tokens
    if len(tokens) > most:
        raise DataError(
            "prompt",
            f"log-probs of a text of {len(tokens)} tokens need engine.max_step_tokens = "
            f"{len(tokens)} or more (now {most})",
        )
    parts = [*_chunks(engine, tokens, first, num_top, temperature)]
    columns = (torch.cat(one).cpu().numpy() for one in zip(*parts, strict=True))
    return TokenScores(*columns)


def _chunks(
    engine: NativeEngine, tokens: NDArray[np.int32], first: int, num_top: int, temperature: float
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield log-probs [M], the likeliest ids [M, K] and their log-probs [M, K], in order."""
    device, model = engine.device, engine.model
    inverse = float(np.float32(1) / np.float32(temperature))
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    hidden = _hidden(engine, ids)
    for start in range(first, len(tokens), LOGIT_ROWS):
        targets = ids[start : start + LOGIT_ROWS]
        logits = model.logits(hidden[start - 1 : start - 1 + len(targets)])
        best = logits.topk(max(num_top, 1)).indices
        scale = torch.full((len(targets),), inverse, device=device)
        logprobs, _, of_best = token_scores(logits, targets, scale, best)
        assert of_best is not None  # candidates were given
        yield logprobs, best[:, :num_top].int(), of_best[:, :num_top]


def _hidden(engine: NativeEngine, ids: torch.Tensor) -> torch.Tensor:
    """Return the hidden states of a text. Shape: ids [T]; returns [T, C]."""
    attend = PackedAttention(
        np.array([len(ids)], np.int32),
        device=engine.device,
        split=engine.cfg.attention_split,
        exponents=engine.model.exponents,
    )
    hidden: torch.Tensor = engine.model(ids, torch.arange(len(ids), device=ids.device), attend)
    return hidden

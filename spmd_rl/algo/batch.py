"""From graded groups, or from prompt-answer pairs, to a `Batch`. numpy only.

How per-token losses become one number is decided here, before anything is split: each token gets a weight,
the batch gets one denominator, and the loss is sum(weight * loss) / denominator over all ranks and micro-batches.

    token   sum over tokens / number of tokens
    sample  mean over sequences of the mean over a sequence's tokens
    const   sum over tokens / (number of sequences * max_response_tokens)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import ConfigError, ContractError
from spmd_rl.types import Batch, Group, Prompt, Sample

Aggregation = Literal["token", "sample", "const"]

NO_VERSION = -1


def pack(
    groups: list[Group],
    advantages: Sequence[NDArray[np.floating]],
    *,
    aggregation: Aggregation = "token",
    max_response_tokens: int | None = None,
) -> Batch:
    """Lay every sample of `groups` end to end, its advantage spread over its response tokens.

    `max_response_tokens` is the fixed length that `aggregation="const"` divides by.
    """
    if [len(group.samples) for group in groups] != [len(values) for values in advantages]:
        raise ContractError("pack needs one advantage for each sample of each group, in the same order")
    rows = [_row(group.prompt, sample) for group in groups for sample in group.samples]
    flat = [float(value) for values in advantages for value in values]
    return _lay_out(rows, flat, aggregation, max_response_tokens)


def pack_sft(
    pairs: Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]],
    *,
    aggregation: Aggregation = "token",
    max_response_tokens: int | None = None,
) -> Batch:
    """Lay (tokens, mask) pairs end to end for supervised training; the mask marks the tokens to learn."""
    rows = []
    for tokens, mask in pairs:
        mask = np.array(mask, dtype=np.bool_)
        mask[:1] = False
        rows.append(
            _Row(np.asarray(tokens, np.int32), mask, np.zeros(len(mask), np.float32), _versions(len(mask)), 1.0)
        )
    return _lay_out(rows, [0.0] * len(rows), aggregation, max_response_tokens)


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the sequences of a batch, as `Trainer.score` returns them.

    Shape: `logprobs` is [T] like the batch's tokens, zero outside its mask; `lengths`, `index` are [N].
    """

    logprobs: NDArray[np.float32]
    lengths: NDArray[np.int32]
    index: NDArray[np.int32]

    @staticmethod
    def join(parts: list[Scores]) -> Scores:
        """All parts as one, in the order of the batch before it was split."""
        lengths = np.concatenate([part.lengths for part in parts])
        index = np.concatenate([part.index for part in parts])
        pieces = np.split(np.concatenate([part.logprobs for part in parts]), np.cumsum(lengths)[:-1])
        order = np.argsort(index, kind="stable")
        logprobs = np.concatenate([pieces[i] for i in order]) if len(order) else np.zeros(0, np.float32)
        return Scores(logprobs, lengths[order], index[order])


@dataclass(frozen=True)
class _Row:
    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    roll_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    temperature: float


def _versions(num_tokens: int) -> NDArray[np.int32]:
    return np.full(num_tokens, NO_VERSION, dtype=np.int32)


def _row(prompt: Prompt, sample: Sample) -> _Row:
    start = len(prompt.tokens)
    if start == 0:
        raise ConfigError(
            f"prompt {prompt.uid} has no tokens: the first response token has nothing to be predicted from"
        )
    tokens = np.concatenate([prompt.tokens, sample.tokens]).astype(np.int32)
    mask = np.arange(len(tokens)) >= start
    roll, versions = np.zeros(len(tokens), np.float32), _versions(len(tokens))
    roll[start:], versions[start:] = sample.logprobs, sample.versions
    return _Row(tokens, mask, roll, versions, sample.temperature)


def _lay_out(
    rows: list[_Row], advantages: list[float], aggregation: Aggregation, max_response_tokens: int | None
) -> Batch:
    if not rows:
        raise ContractError("cannot pack a batch of no sequences")
    mask = np.concatenate([row.mask for row in rows])
    lengths = np.array([len(row.tokens) for row in rows], dtype=np.int32)
    num_learned = np.array([row.mask.sum() for row in rows], dtype=np.int64)
    per_token = np.repeat(_sequence_weights(num_learned, aggregation), lengths)
    return Batch(
        tokens=np.concatenate([row.tokens for row in rows]),
        lengths=lengths,
        mask=mask,
        weight=np.where(mask, per_token, 0).astype(np.float32),
        advantages=np.where(mask, np.repeat(advantages, lengths), 0).astype(np.float32),
        roll_logprobs=np.concatenate([row.roll_logprobs for row in rows]),
        versions=np.concatenate([row.versions for row in rows]),
        temperature=np.array([row.temperature for row in rows], dtype=np.float32),
        index=np.arange(len(rows), dtype=np.int32),
        denominator=_denominator(num_learned, aggregation, max_response_tokens),
    )


def _sequence_weights(num_learned: NDArray[np.int64], aggregation: Aggregation) -> NDArray[np.float64]:
    if aggregation == "sample":
        return 1.0 / np.maximum(num_learned, 1)
    return np.ones(len(num_learned))


def _denominator(num_learned: NDArray[np.int64], aggregation: Aggregation, max_response_tokens: int | None) -> float:
    if aggregation == "token":
        return float(max(num_learned.sum(), 1))
    if aggregation == "sample":
        return float(len(num_learned))
    if aggregation != "const":
        raise ConfigError(f"aggregation is one of token, sample, const; not {aggregation!r}")
    if not max_response_tokens:
        raise ConfigError("aggregation 'const' divides by a fixed length: give max_response_tokens")
    return float(len(num_learned) * max_response_tokens)

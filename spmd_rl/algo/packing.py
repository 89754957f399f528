"""From graded groups, or from prompt-answer pairs, to a `Batch`. numpy only.

How per-token losses become one number is decided here, before anything is split: each token gets a
weight, the batch gets one denominator, and the loss is sum(weight * loss) / denominator over all
ranks and micro-batches.

    token   sum over tokens / number of tokens
    sample  mean over sequences of the mean over a sequence's tokens
    const   sum over tokens / (number of sequences * max_response_tokens)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import ConfigError, ContractError, DataError
from spmd_rl.types.batch import Batch
from spmd_rl.types.columns import end_to_end, ends, places
from spmd_rl.types.samples import Group

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
    columns = Group.to_columns(groups)
    prompts, samples = columns.prompts, columns.samples
    if columns.lengths.tolist() != [len(values) for values in advantages]:
        raise ContractError(
            "pack needs one advantage for each sample of each group, in the same order"
        )
    if not len(samples) and (reasons := [*chain(*columns.skipped)]):
        raise DataError("no sample of this step could be graded", reasons[0])
    prompt = np.repeat(np.arange(len(prompts)), columns.lengths)  # of each sample
    if (bare := prompts.uid[prompt][prompts.lengths[prompt] == 0]).size:
        raise ConfigError(
            f"prompt {bare[0]} has no tokens: the first response token has nothing to be predicted from"
        )
    # Where prompts and samples lie behind each other, a sequence is a row of these and a row of
    # those.
    lengths = np.concatenate([prompts.lengths, samples.lengths])
    pairs = np.stack([prompt, len(prompts) + np.arange(len(samples))], axis=1)
    flat = places(lengths, pairs.reshape(-1))
    asked = len(prompts.tokens)
    rows = _Rows(
        tokens=np.concatenate([prompts.tokens, samples.tokens])[flat],
        lengths=lengths[pairs].sum(1, dtype=np.int32),
        mask=flat >= asked,
        roll_logprobs=np.concatenate([np.zeros(asked, np.float32), samples.logprobs])[flat],
        versions=np.concatenate([np.full(asked, NO_VERSION, np.int32), samples.versions])[flat],
        temperature=samples.temperature.astype(np.float32),
    )
    return _lay_out(rows, end_to_end(advantages, np.float64), aggregation, max_response_tokens)


def pack_sft(
    pairs: Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]],
    *,
    aggregation: Aggregation = "token",
    max_response_tokens: int | None = None,
) -> Batch:
    """Lay (tokens, mask) pairs end to end for supervised training; the mask marks the tokens to
    learn.
    """
    lengths = np.array([len(tokens) for tokens, _ in pairs], dtype=np.int32)
    mask = end_to_end([mask for _, mask in pairs], np.bool_)
    mask[np.cumsum(lengths) - lengths] = False
    rows = _Rows(
        tokens=end_to_end([tokens for tokens, _ in pairs], np.int32),
        lengths=lengths,
        mask=mask,
        roll_logprobs=np.zeros(len(mask), np.float32),
        versions=np.full(len(mask), NO_VERSION, np.int32),
        temperature=np.ones(len(pairs), np.float32),
    )
    return _lay_out(rows, np.zeros(len(pairs)), aggregation, max_response_tokens)


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the sequences of a batch, as `Trainer.score` returns them.

    Shape: `logprobs` is [T] like the batch's tokens, zero outside its mask; `lengths`, `index` are
    [N].
    """

    logprobs: NDArray[np.float32]
    lengths: NDArray[np.int32]
    index: NDArray[np.int32]

    @staticmethod
    def join(parts: list[Scores]) -> Scores:
        """All parts as one, in the order of the batch before it was split."""
        lengths = np.concatenate([part.lengths for part in parts])
        index = np.concatenate([part.index for part in parts])
        pieces = np.split(
            np.concatenate([part.logprobs for part in parts]), np.cumsum(lengths)[:-1]
        )
        order = np.argsort(index, kind="stable")
        logprobs = (
            np.concatenate([pieces[i] for i in order]) if len(order) else np.zeros(0, np.float32)
        )
        return Scores(logprobs, lengths[order], index[order])


@dataclass(frozen=True)
class _Rows:
    """Sequences end to end. Shape: as in `Batch`."""

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    mask: NDArray[np.bool_]
    roll_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    temperature: NDArray[np.float32]


def _lay_out(
    rows: _Rows,
    advantages: NDArray[np.float64],
    aggregation: Aggregation,
    max_response_tokens: int | None,
) -> Batch:
    num_sequences = len(rows.lengths)
    if num_sequences == 0:
        raise ContractError("cannot pack a batch of no sequences")
    num_learned = np.diff(ends(rows.mask)[ends(rows.lengths)])
    return Batch(
        tokens=rows.tokens,
        lengths=rows.lengths,
        mask=rows.mask,
        weight=_spread(_sequence_weights(num_learned, aggregation), rows),
        advantages=_spread(advantages, rows),
        roll_logprobs=rows.roll_logprobs,
        versions=rows.versions,
        temperature=rows.temperature,
        index=np.arange(num_sequences, dtype=np.int32),
        denominator=_denominator(num_learned, aggregation, max_response_tokens),
    )


def _spread(values: NDArray[np.float64], rows: _Rows) -> NDArray[np.float32]:
    """A value a sequence, spread over its tokens in the mask."""
    return np.where(rows.mask, np.repeat(values.astype(np.float32), rows.lengths), np.float32(0))


def _sequence_weights(
    num_learned: NDArray[np.int64], aggregation: Aggregation
) -> NDArray[np.float64]:
    if aggregation == "sample":
        return 1.0 / np.maximum(num_learned, 1)
    return np.ones(len(num_learned))


def _denominator(
    num_learned: NDArray[np.int64], aggregation: Aggregation, max_response_tokens: int | None
) -> float:
    if aggregation == "token":
        return float(max(num_learned.sum(), 1))
    if aggregation == "sample":
        return float(len(num_learned))
    if aggregation != "const":
        raise ConfigError(f"aggregation is one of token, sample, const; not {aggregation!r}")
    if not max_response_tokens:
        raise ConfigError("aggregation 'const' divides by a fixed length: give max_response_tokens")
    return float(len(num_learned) * max_response_tokens)

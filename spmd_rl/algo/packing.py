"""Packing: graded groups, or prompt-answer pairs, become a `Batch`. numpy only.

Packing also decides how per-token losses become one number, before anything is split. Each token
gets a weight and the batch gets one denominator. The loss is sum(weight * loss) / denominator over
all ranks and micro-batches.

    token   sum over tokens / number of tokens
    sample  mean over sequences of the mean over a sequence's tokens
    execution  mean over executions of the mean over all tokens of an execution's samples
    const   sum over tokens / (number of sequences * max_response_tokens)
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spmd_rl.algo.by_source import source_columns
from spmd_rl.algo.executions import executions_of
from spmd_rl.errors import ConfigError, ContractError, DataError
from spmd_rl.types.batch import Batch
from spmd_rl.types.columns import concatenate, entry_indices, join_by_name
from spmd_rl.types.groups import Group, GroupColumns
from spmd_rl.types.routes import EXPERT_IDS
from spmd_rl.types.samples import NO_VERSION, SampleColumns, error_of
from spmd_rl.types.sft_pair import SftPair
from spmd_rl.types.token_data import TokenData

Aggregation = Literal["token", "sample", "execution", "const"]
AdvantageOf = Literal["samples", "tokens"]
TokensAndMask = tuple[NDArray[np.int32], NDArray[np.bool_]] | SftPair


def pack(
    groups: list[Group],
    advantages: Sequence[NDArray[np.floating]],
    *,
    aggregation: Aggregation = "token",
    max_response_tokens: int | None = None,
    advantages_of: AdvantageOf = "samples",
) -> Batch:
    """Return the samples of `groups` as a batch, with a sample's advantage on each response token.

    `max_response_tokens` is the fixed length that `aggregation="const"` divides by. `advantages`
    are an array a group, of its samples or of all their tokens end to end, as `advantages_of` says.
    Raises: ContractError, DataError, ConfigError.
    """
    columns = Group.to_columns(groups)
    contexts = _Contexts.of(columns)
    _check(columns, contexts, advantages, advantages_of)
    batch = _sequences(columns, contexts)
    per_token = concatenate(advantages, np.float64)
    if advantages_of == "samples":
        per_token = np.repeat(per_token, batch.lengths)
    else:
        per_token = _after_contexts(per_token, batch.lengths, columns.samples.lengths)
    return _weighted(batch, per_token, executions_of(columns), aggregation, max_response_tokens)


def _check(
    columns: GroupColumns,
    contexts: _Contexts,
    advantages: Sequence[NDArray[np.floating]],
    advantages_of: AdvantageOf,
) -> None:
    sizes = columns.lengths
    if advantages_of == "tokens":
        ends = columns.samples.offsets[columns.offsets]
        sizes = ends[1:] - ends[:-1]
    if sizes.tolist() != [len(values) for values in advantages]:
        raise ContractError(
            f"pack needs an advantage for each of the {advantages_of} of each group, in the order "
            "of the groups"
        )
    if not len(columns.samples) and (failed := columns.failed.samples.rows()):
        raise DataError("no sample of this step is usable", error_of(failed[0]))
    empty = columns.prompts.uid[columns.of_sample][contexts.lengths[contexts.of_sample] == 0]
    if empty.size:
        raise ConfigError(
            f"prompt {empty[0]} has no tokens, so its first response token cannot be predicted"
        )


def _sequences(columns: GroupColumns, contexts: _Contexts) -> Batch:
    """Return each sample as a sequence: its context, which is the prompt or its own, then its own
    tokens. The weights are 0.
    """
    samples = columns.samples
    # With all contexts and then all samples end to end, a sequence is one row of each.
    lengths = np.concatenate([contexts.lengths, samples.lengths])
    num_contexts = len(contexts.lengths)
    row_pairs = np.stack([contexts.of_sample, num_contexts + np.arange(len(samples))], axis=1)
    flat = entry_indices(lengths, row_pairs.reshape(-1))
    no_data = TokenData.observed(contexts.tokens)

    def placed(of_contexts: NDArray[Any], of_samples: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([of_contexts, of_samples])[flat]

    versions = placed(no_data.versions, samples.versions)
    mask = versions != NO_VERSION
    if len(samples.mask):
        mask = placed(np.zeros(len(no_data), np.bool_), samples.mask)
    before = contexts.routes(samples)
    further = join_by_name([before, samples.columns], [len(no_data), len(samples.tokens)])
    nothing = np.zeros(len(mask), np.float32)
    return Batch(
        tokens=placed(contexts.tokens, samples.tokens),
        lengths=lengths[row_pairs].sum(1, dtype=np.int32),
        mask=mask,
        weight=nothing,
        advantages=nothing,
        rollout_logprobs=placed(no_data.logprobs, samples.logprobs),
        versions=versions,
        temperature=samples.temperature.astype(np.float32),
        index=np.arange(len(samples), dtype=np.int32),
        denominator=1.0,
        kept=samples.kept if any(map(len, samples.kept)) else [],
        columns={name: values[flat] for name, values in further.items()},
    )


@dataclass(frozen=True)
class _Contexts:
    """What stands before the samples' own tokens: all prompts, then the contexts of samples.

    Shape: `lengths` is [C], `tokens` is [sum(lengths)], `of_sample` is [N], a row of `lengths`.
    """

    lengths: NDArray[np.int64]
    tokens: NDArray[np.int32]
    of_sample: NDArray[np.int64]

    @staticmethod
    def of(columns: GroupColumns) -> _Contexts:
        prompts, own = columns.prompts, columns.samples.context
        of_sample = columns.of_sample
        if not len(own):
            return _Contexts(prompts.lengths, prompts.tokens, of_sample)
        lengths = np.array([len(tokens) for tokens in own], np.int64)
        return _Contexts(
            np.concatenate([prompts.lengths, lengths]),
            concatenate([prompts.tokens, *own], np.int32),
            np.where(lengths > 0, len(prompts) + np.arange(len(own)), of_sample),
        )

    def routes(self, samples: SampleColumns) -> dict[str, NDArray[Any]]:
        """Return the experts of the contexts' tokens as a column, where samples have them.

        Those of a context are of the first sample that it is of, and has some.
        Raises: ContractError for routes of fewer tokens.
        """
        like = samples.columns.get(EXPERT_IDS)
        if like is None or not len(samples.prompt_routes):
            return {}
        found = np.zeros((len(self.tokens), *like.shape[1:]), like.dtype)
        ends, row_bytes = np.cumsum(self.lengths), found.itemsize * found.shape[1]
        known: set[int] = set()
        for context, blob in zip(self.of_sample.tolist(), samples.prompt_routes, strict=True):
            if context in known or not len(blob):
                continue
            known.add(context)
            length, end = int(self.lengths[context]), int(ends[context])
            if len(blob) % row_bytes or len(blob) < length * row_bytes:
                raise ContractError(
                    f"a sample has prompt_routes of {len(blob)} bytes: expected {row_bytes} for "
                    f"each of the {length} tokens before it"
                )
            rows = blob[: length * row_bytes].view(like.dtype)
            found[end - length : end] = rows.reshape(length, -1)
        return {EXPERT_IDS: found}


def pack_sft(
    pairs: Sequence[TokensAndMask],
    *,
    aggregation: Aggregation = "token",
    max_response_tokens: int | None = None,
) -> Batch:
    """Return (tokens, mask) pairs as a batch for supervised training.

    The mask marks the tokens to learn. Pairs of several sources are measured by source, too.
    """
    sequences = [SftPair(*pair) for pair in pairs]
    advantages = np.zeros(sum(len(pair.tokens) for pair in sequences))
    execution = np.arange(len(pairs))
    batch = _weighted(
        _pair_sequences(sequences), advantages, execution, aggregation, max_response_tokens
    )
    sources = [pair.source for pair in sequences]
    columns = source_columns(sources, batch.num_learned, batch.lengths)
    return replace(batch, columns=columns)


def _pair_sequences(pairs: Sequence[SftPair]) -> Batch:
    """Return each pair as a sequence. Its first token is not learned: nothing predicts it.

    The weights are 0.
    """
    lengths = np.array([len(pair.tokens) for pair in pairs], dtype=np.int32)
    mask = concatenate([pair.mask for pair in pairs], np.bool_)
    mask[np.cumsum(lengths) - lengths] = False
    nothing = np.zeros(len(mask), np.float32)
    return Batch(
        tokens=concatenate([pair.tokens for pair in pairs], np.int32),
        lengths=lengths,
        mask=mask,
        weight=nothing,
        advantages=nothing,
        rollout_logprobs=nothing,
        versions=np.full(len(mask), NO_VERSION, np.int32),
        temperature=np.ones(len(pairs), np.float32),
        index=np.arange(len(pairs), dtype=np.int32),
        denominator=1.0,
    )


def _weighted(
    batch: Batch,
    advantages: NDArray[np.float64],  # of each token, those outside the mask included
    execution: NDArray[np.int64],  # the run that each sequence comes from
    aggregation: Aggregation,
    max_response_tokens: int | None,
) -> Batch:
    """Return the batch with its advantages, weights and denominator."""
    if aggregation not in (names := typing.get_args(Aggregation)):
        raise ConfigError(f"aggregation must be one of {', '.join(names)}, not {aggregation!r}")
    if not batch.num_sequences:
        raise ContractError("no sequences to pack: a batch needs at least one")
    weights, denominator = _aggregated(
        batch.num_learned, execution, aggregation, max_response_tokens
    )
    return replace(
        batch,
        weight=_in_mask(np.repeat(weights, batch.lengths), batch),
        advantages=_in_mask(advantages, batch),
        denominator=float(denominator),
    )


def _in_mask(values: NDArray[np.float64], batch: Batch) -> NDArray[np.float32]:
    """Return the values of tokens in the mask, and 0 for all others. Shape: [T]."""
    return np.where(batch.mask, values.astype(np.float32), np.float32(0))


def _after_contexts(
    values: NDArray[np.float64], lengths: NDArray[np.int32], own_lengths: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the values of the samples' own tokens, each after zeros for its context.

    Shape: [sum(own_lengths)] to [sum(lengths)].
    """
    placed = np.zeros(int(lengths.sum()))
    ends = np.cumsum(lengths, dtype=np.int64)
    firsts = np.repeat(ends - own_lengths, own_lengths)
    within = np.arange(len(values)) - np.repeat(np.cumsum(own_lengths) - own_lengths, own_lengths)
    placed[firsts + within] = values
    return placed


def _aggregated(
    num_learned: NDArray[np.int64],
    execution: NDArray[np.int64],
    aggregation: Aggregation,
    max_response_tokens: int | None,
) -> tuple[NDArray[np.float64], float]:
    """Return the weight of each sequence's tokens, and the denominator."""
    num_sequences = len(num_learned)
    if aggregation == "sample":
        return 1.0 / num_learned.clip(1), num_sequences
    if aggregation == "execution":
        learned = np.bincount(execution, num_learned).clip(1)
        return 1.0 / learned[execution], len(np.unique(execution))
    weights = np.ones(num_sequences)
    if aggregation == "token":
        return weights, max(num_learned.sum(), 1)
    if not max_response_tokens:
        raise ConfigError("aggregation 'const' divides by a fixed length: pass max_response_tokens")
    return weights, num_sequences * max_response_tokens

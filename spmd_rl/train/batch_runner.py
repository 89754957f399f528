"""BatchRunner: forward passes over a whole batch, which it splits into micro-batches.

Shape letters: N sequences of this rank's shard, T tokens of them, M scored tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.algo.losses import Needs
from spmd_rl.errors import ContractError, DataError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.train.backend import ModelBackend, Outputs
from spmd_rl.train.microbatch import MicroBatch, lay_out, num_micro_batches, split_sequences
from spmd_rl.types.batch import Batch
from spmd_rl.types.columns import entry_indices
from spmd_rl.types.routes import EXPERT_IDS
from spmd_rl.types.sequence_ends import sequence_ends
from spmd_rl.types.token_values import SequenceValues, TokenValues, TopLogprobs

NOTHING_ELSE = Needs()
Tensors = tuple[Tensor, ...]
RunEach = Callable[[Sequence[MicroBatch], Callable[[int, Tensors], None]], None]


class BatchRunner:
    """Runs a model on this rank's shards. All ranks of the role call each method together."""

    def __init__(self, backend: ModelBackend, context: RoleContext, max_tokens: int) -> None:
        self.backend = backend
        self._context = context
        self._max_tokens = max_tokens

    def check_fits(self, batch: Batch) -> None:
        """Raise a DataError for a sequence longer than the model's positions."""
        limit = self.backend.max_positions
        for index, length in zip(batch.index, batch.lengths, strict=True):
            if length > limit:
                problem = f"{length} tokens are more than the model's {limit} positions"
                raise DataError(f"batch, sequence {index}", problem)

    def micro_batches(self, parts: Sequence[Batch]) -> list[MicroBatch]:
        """Return the micro-batches of each part of a shard, one part after the other.

        Each has as many as the part that needs most, on any rank.
        """
        count = self._most_micro_batches(parts)
        return [micro for one in parts for micro in self._laid_out(one, _split(one, count))]

    def score(self, batch: Batch) -> TokenValues:
        """Return the log-probs of the shard's tokens."""
        self.check_fits(batch)
        return self._token_values(self.score_each(batch, logprobs_of), batch)

    def top_logprobs(self, batch: Batch, num_top: int) -> TopLogprobs:
        """Return the likeliest tokens before the shard's tokens."""
        self.check_fits(batch)
        ids, logprobs = self._per_token(
            batch, lambda micros, visit: self.backend.top_logprobs(micros, num_top, visit)
        )
        return TopLogprobs(self._token_values(ids, batch), self._token_values(logprobs, batch))

    def values(self, batch: Batch) -> TokenValues:
        """Return the values of the states before the shard's tokens."""
        self.check_fits(batch)
        return self._token_values(self.score_each(batch, _values_of), batch)

    def rewards(self, batch: Batch) -> SequenceValues:
        """Return the values of the states after the shard's sequences."""
        ends = sequence_ends(batch)
        self.check_fits(ends)
        return SequenceValues(self.score_each(ends, _values_of)[ends.mask], batch.index)

    def score_each(
        self, batch: Batch, pick: Callable[[Outputs], Tensor], needs: Needs = NOTHING_ELSE
    ) -> NDArray[np.float32]:
        """Return what `pick` takes of the outputs for each token, zero outside the mask.

        Shape: `pick` returns [M] or [M, K]; returns [T] or [T, K].
        """

        def run(micros: Sequence[MicroBatch], visit: Callable[[int, Tensors], None]) -> None:
            self.backend.forward(
                micros, lambda number, outputs: visit(number, (pick(outputs),)), needs
            )

        (scores,) = self._per_token(batch, run)
        return scores

    def _per_token(self, batch: Batch, run: RunEach) -> list[NDArray[np.float32]]:
        """Return for each tensor that `run` computes an array, zero outside the mask.

        `run` is given the micro-batches, and a function to call with the number and tensors of
        each.
        Shape: tensors are [M] or [M, K], arrays [T] or [T, K].
        """
        parts = _split(batch, self._most_micro_batches([batch]))
        found: dict[int, list[NDArray[np.float32]]] = {}

        def visit(number: int, tensors: Tensors) -> None:
            found[number] = [tensor.cpu().numpy() for tensor in tensors]

        run(self._laid_out(batch, parts), visit)
        scores = [np.zeros((batch.num_tokens, *one.shape[1:]), one.dtype) for one in found[0]]
        for number, part in enumerate(parts):
            flat = entry_indices(batch.lengths, np.array(part, np.int64))
            scored = flat[batch.mask[flat]]
            for whole, rows in zip(scores, found[number], strict=True):
                whole[scored] = rows
        return scores

    def _with_replayed(self, batch: Batch) -> Batch:
        """Return the batch with the routes that the backend replays, or with none.

        Raises: ContractError for routes that are not of its model.
        """
        if EXPERT_IDS not in batch.columns:
            return batch
        if self.backend.replays is None:
            others = {name: one for name, one in batch.columns.items() if name != EXPERT_IDS}
            return replace(batch, columns=others)
        self.backend.replays.check(batch.columns[EXPERT_IDS])
        return batch

    def _token_values(self, values: NDArray[np.float32], batch: Batch) -> TokenValues:
        return TokenValues(values, batch.lengths, batch.index)

    def _laid_out(self, batch: Batch, parts: Sequence[list[int]]) -> list[MicroBatch]:
        backend, batch = self.backend, self._with_replayed(batch)
        return [lay_out(batch.select(part), backend.device, backend.packs_whole) for part in parts]

    def _most_micro_batches(self, parts: Sequence[Batch]) -> int:
        """Return how many the part that needs most has, on any rank. Ranks: all of the role."""
        numbers = [
            num_micro_batches(one.unit_lengths().tolist(), self._max_tokens) for one in parts
        ]
        return self._context.all_reduce_max(max(*numbers, 1))


def _split(batch: Batch, count: int) -> list[list[int]]:
    """Return the sequences of each of `count` micro-batches."""
    parts = split_sequences(batch.unit_lengths().tolist(), count)
    return [batch.sequences_of(part) for part in parts]


def logprobs_of(outputs: Outputs) -> Tensor:
    """Return the log-probs. Raises: ContractError for a model that has none."""
    if outputs.logprobs is None:
        raise ContractError("a model with a value head has no log-probs to score with")
    return outputs.logprobs


def _values_of(outputs: Outputs) -> Tensor:
    """Return the values. Raises: ContractError for a model that has none."""
    if outputs.values is None:
        raise ContractError(
            "a language model has no values: its config.json names no architecture "
            "for sequence classification, as that of a reward model does"
        )
    return outputs.values

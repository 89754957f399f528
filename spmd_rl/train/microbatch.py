"""Micro-batches: how a rank's sequences are split into them, and the tensors of one.

Every rank runs the same number of micro-batches, because each is a collective. A rank with fewer
sequences runs empty ones: a single token from which nothing is learned.

Shape letters: T tokens, N sequences, M tokens in the loss mask, of one micro-batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.errors import ContractError
from spmd_rl.kernels.attention.shared_tokens import SharedTokens
from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.kernels.vocab.kept_sets import KeptSets
from spmd_rl.train import shared_prefix
from spmd_rl.types.batch import Batch
from spmd_rl.types.columns import offsets_of
from spmd_rl.types.kept_sets import NO_SET, set_ends
from spmd_rl.types.partition import balanced_partition
from spmd_rl.types.routes import EXPERT_IDS, of_rows

# fields of a micro-batch with an entry for each scored token
OF_SCORED = (
    "rows",
    "targets",
    "sequence",
    "inv_temperature",
    "weight",
    "advantages",
    "rollout_logprobs",
    "versions",
)


def num_micro_batches(lengths: Sequence[int], max_tokens: int) -> int:
    """Return the least number of balanced micro-batches of at most `max_tokens` tokens each.

    A sequence longer than `max_tokens` raises the limit to its own length. To partition many
    sequences takes long, so few counts are tried: ever larger ones, then by bisection.
    """
    if not lengths:
        return 0
    limit = max(max_tokens, *lengths)

    def fits(count: int) -> bool:
        return all(
            sum(lengths[i] for i in part) <= limit for part in balanced_partition(lengths, count)
        )

    too_few, step = -(-sum(lengths) // limit) - 1, 1
    while not fits(too_few + step):
        too_few, step = too_few + step, 2 * step
    return bisect_left(range(too_few + 1, too_few + step), True, key=fits) + too_few + 1


def split_sequences(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return the sequences in `count` parts of balanced length, empty parts last."""
    return sorted(balanced_partition(lengths, count), key=lambda part: part or [len(lengths)])


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one forward pass.

    `rows` are the positions whose hidden state predicts a token of the mask. `versions` are those
    of the weights that drew the tokens. `kept` has the sets that log-probs are taken over, or is
    None for the whole vocabulary. `experts` are the recorded routes of all tokens, or None
    (types/routes.py). With `shared`, it is a rank's part of another one: `tokens`, `positions` and
    `experts` are of its own rows, and so is all that is scored (fsdp2/sequence_shards.py).
    Shape: tokens, positions [T] int64; lengths, prefixes [P] on the host, as in `PackedLayout`;
    rows, targets, sequence [M] int64; inv_temperature, weight, advantages, rollout_logprobs [M]
    fp32; versions [M] int32; columns [M] or [M, K], those of the batch; experts [T, W].
    """

    tokens: Tensor
    positions: Tensor
    lengths: NDArray[np.int32]
    prefixes: NDArray[np.int32]
    rows: Tensor
    targets: Tensor
    sequence: Tensor
    inv_temperature: Tensor
    weight: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    versions: Tensor
    num_sequences: int = 0
    columns: dict[str, Tensor] = field(default_factory=dict)
    kept: KeptSets | None = None
    experts: Tensor | None = None
    shared: SharedTokens | None = None

    @property
    def num_scored(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """The tokens among the rows; the rest is padding."""
        return len(self.tokens) if self.shared is None else self.shared.num_own

    def scored(self, chosen: Tensor) -> MicroBatch:
        """Return a micro-batch that scores some of the tokens. Shape: chosen [m] int64."""
        return replace(
            self,
            columns={name: column[chosen] for name, column in self.columns.items()},
            kept=self.kept and self.kept.select(chosen),
            **{name: getattr(self, name)[chosen] for name in OF_SCORED},
        )


def lay_out(batch: Batch, device: torch.device, whole: bool = False) -> MicroBatch:
    """Return the micro-batch of these sequences on `device`.

    Without a token to score it is one token with an empty mask. Shared prompts are packed once on
    the CPU, whose attention can read them so, unless sequences are wanted `whole`.
    """
    if not batch.mask.any():
        return _empty(batch, device)
    layout = _packed(batch, device.type == "cpu" and not whole)
    sequence = np.repeat(np.arange(batch.num_sequences), batch.lengths)
    positions = np.arange(batch.num_tokens) - (np.cumsum(batch.lengths) - batch.lengths)[sequence]
    scored = np.flatnonzero(batch.mask)
    sequence = sequence[scored]

    def tensor(array: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        return upload(array, device).to(dtype)

    return MicroBatch(
        tokens=tensor(batch.tokens[layout.source], torch.int64),
        positions=tensor(positions[layout.source], torch.int64),
        lengths=layout.lengths,
        prefixes=layout.prefixes,
        rows=tensor(layout.position[scored - 1], torch.int64),
        targets=tensor(batch.tokens[scored], torch.int64),
        sequence=tensor(sequence, torch.int64),
        inv_temperature=tensor(inverse_temperature(batch.temperature)[sequence], torch.float32),
        weight=tensor(batch.weight[scored], torch.float32),
        advantages=tensor(batch.advantages[scored], torch.float32),
        rollout_logprobs=tensor(batch.rollout_logprobs[scored], torch.float32),
        versions=tensor(batch.versions[scored], torch.int32),
        num_sequences=batch.num_sequences,
        columns=_columns(batch, scored, device),
        kept=_kept_sets(batch, scored, sequence, device) if batch.kept else None,
        experts=_experts(batch, layout.source, device),
    )


def _columns(batch: Batch, tokens: NDArray[np.int64], device: torch.device) -> dict[str, Tensor]:
    """Return the columns of these tokens, but for routes, which are those of all tokens."""
    return {
        name: upload(column[tokens], device)
        for name, column in batch.columns.items()
        if name != EXPERT_IDS
    }


def _experts(batch: Batch, tokens: NDArray[np.int64], device: torch.device) -> Tensor | None:
    """Return the recorded routes of these tokens' rows, if there are some."""
    if EXPERT_IDS not in batch.columns:
        return None
    return upload(of_rows(batch.columns[EXPERT_IDS], batch.lengths)[tokens], device)


def _packed(batch: Batch, shares: bool) -> shared_prefix.PackedLayout:
    return shared_prefix.pack_shared(batch) if shares else shared_prefix.pack_whole(batch)


def _kept_sets(
    batch: Batch, scored: NDArray[np.int64], sequence: NDArray[np.int64], device: torch.device
) -> KeptSets:
    """Return the sets of the tokens at `scored`, of the sequences `sequence`.

    A sequence's sets are those of its last tokens. Without any, the whole vocabulary is its
    tokens' set. Shape: both [M]. Raises: ContractError where some tokens lack a set.
    """
    blobs = [*batch.kept, np.frombuffer(NO_SET, np.uint8)]
    offsets = offsets_of(np.array([len(blob) for blob in blobs]))
    ends_of_blobs = [set_ends(blob) for blob in blobs]
    last = np.cumsum([len(ends) for ends in ends_of_blobs])
    entry = last[sequence] - (np.cumsum(batch.lengths)[sequence] - scored)
    is_missing = entry < np.concatenate([[0], last[:-1]])[sequence]
    if (is_missing & (np.diff(offsets)[sequence] > 0)).any():
        raise ContractError("Batch.kept needs a set for each token of the mask, or none at all")
    entry[is_missing] = last[-1] - 1
    ends = np.concatenate([one + start for one, start in zip(ends_of_blobs, offsets, strict=False)])
    starts = np.concatenate([[0], ends[:-1]])
    data = np.concatenate(blobs)
    return KeptSets(*(upload(array, device) for array in (data, starts[entry], ends[entry])))


def _empty(batch: Batch, device: torch.device) -> MicroBatch:
    index, number = (
        torch.zeros(0, dtype=dtype, device=device) for dtype in (torch.int64, torch.float32)
    )
    token = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(
        tokens=token,
        positions=token,
        lengths=np.ones(1, np.int32),
        prefixes=np.full(1, -1, np.int32),
        rows=index,
        targets=index,
        sequence=index,
        inv_temperature=number,
        weight=number,
        advantages=number,
        rollout_logprobs=number,
        versions=index.int(),
        columns=_columns(batch, np.zeros(0, np.int64), device),
        experts=_no_experts(batch, device),
    )


def _no_experts(batch: Batch, device: torch.device) -> Tensor | None:
    if (routes := batch.columns.get(EXPERT_IDS)) is None:
        return None
    return upload(np.zeros((1, *routes.shape[1:]), routes.dtype), device)


def without_scores(micro: MicroBatch) -> MicroBatch:
    """Return an empty micro-batch beside `micro`: its first token, and nothing to score."""
    return replace(
        micro.scored(micro.rows[:0]),
        tokens=micro.tokens[:1],
        positions=micro.positions[:1],
        lengths=np.ones(1, np.int32),
        prefixes=np.full(1, -1, np.int32),
        num_sequences=0,
        kept=None,
        experts=None if micro.experts is None else micro.experts[:1],
    )


def inverse_temperature(temperature: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return 1 / T in fp32, rounded on the host as in the engine; 1 for greedy samples (T = 0)."""
    return np.float32(1) / np.where(temperature == 0, np.float32(1), temperature).astype(np.float32)

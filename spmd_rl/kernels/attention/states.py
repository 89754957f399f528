"""States that sequences hand on from token to token, in the trainer's passes and an engine's steps.

A layer that has them asks `TokenAttention.sequences`. It takes the states before the new tokens of
each sequence, and gives those after them. A trainer's sequence begins without any, or with those of
the prompt that it continues. An engine keeps them in slots, with a slot for each sequence that runs
and some for snapshots.

Shape letters: B sequences, N slots.
"""

from __future__ import annotations

from math import prod
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.runtime.upload import upload

ALIGNMENT = 256  # bytes, of each array of states


class StateArray(Protocol):
    """What a layer hands on of a sequence: an array, in fp32 or in the dtype of its pass."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def is_wide(self) -> bool: ...


class SequenceStates(Protocol):
    """The states of a layer in one pass. Shape: lengths [B], new tokens of each sequence, at least
    1; of a state [B, ...].
    """

    lengths: NDArray[np.int64]

    def begin(self) -> tuple[Tensor, ...] | None:
        """Return the states before the new tokens; None where no sequence has tokens before."""

    def end(self, *states: Tensor) -> None:
        """Keep the states after the new tokens."""


class PackedStates:
    """States of sequences that begin in a pass, or continue sequences `parents` of `before`."""

    def __init__(
        self,
        lengths: NDArray[np.int64],
        before: PackedStates | None = None,
        parents: NDArray[np.int64] | None = None,
    ) -> None:
        self.lengths = lengths
        self._before = before
        self._parents = parents
        self._ended: tuple[Tensor, ...] = ()

    def begin(self) -> tuple[Tensor, ...] | None:
        if self._before is None or self._parents is None:
            return None
        ended = self._before._ended
        parents = torch.from_numpy(self._parents).to(ended[0].device)
        return tuple(one.index_select(0, parents) for one in ended)

    def end(self, *states: Tensor) -> None:
        self._ended = states


class StateSlots:
    """Which slots the sequences of a step have. Those of `fresh` have no tokens before.

    Shape: index [B] int64 and fresh [B] bool on the device, or None if no sequence is; lengths [B].
    """

    def __init__(
        self, index: Tensor, lengths: NDArray[np.int64], fresh: Tensor | None = None
    ) -> None:
        self.index = index
        self.lengths = lengths
        self.fresh = fresh

    @classmethod
    def of_chunks(
        cls,
        slots: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        device: torch.device,
    ) -> StateSlots:
        fresh = upload(starts == 0, device) if (starts == 0).any() else None
        return cls(upload(slots, device), lengths, fresh)


class SlotStates:
    """States of a layer in the slots of an engine. Shape: each array [N, ...]."""

    def __init__(self, arrays: tuple[Tensor, ...], slots: StateSlots) -> None:
        self.lengths = slots.lengths
        self._arrays = arrays
        self._slots = slots

    def begin(self) -> tuple[Tensor, ...]:
        states = tuple(one.index_select(0, self._slots.index) for one in self._arrays)
        if self._slots.fresh is not None:
            for one in states:  # what another sequence left there is no part of it, NaN included
                one.masked_fill_(self._slots.fresh.view(-1, *(1,) * (one.dim() - 1)), 0)
        return states

    def end(self, *states: Tensor) -> None:
        for array, new in zip(self._arrays, states, strict=True):
            array.index_copy_(0, self._slots.index, new)


def state_bytes(states: tuple[StateArray, ...], num_slots: int, itemsize: int) -> int:
    """Return the bytes of so many slots of a layer, whose pass has elements of `itemsize`."""
    return sum(
        -(-num_slots * prod(one.shape) * (4 if one.is_wide else itemsize) // ALIGNMENT) * ALIGNMENT
        for one in states
    )


def state_arrays(
    memory: Tensor, states: tuple[StateArray, ...], num_slots: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the arrays of a layer as views of `memory`, which has `state_bytes` of them."""
    arrays, begin = [], 0
    for one in states:
        kind = torch.float32 if one.is_wide else dtype
        size = num_slots * prod(one.shape) * kind.itemsize
        arrays.append(memory[begin : begin + size].view(kind).view(num_slots, *one.shape))
        begin += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(arrays)

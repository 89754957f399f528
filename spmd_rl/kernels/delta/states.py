"""States that sequences hand on from token to token, in the trainer's passes and an engine's steps.

A layer that has them asks `TokenAttention.sequences`. It takes the states before the new tokens of
each sequence, and gives those after them. A trainer's sequence begins without any, or with those of
the prompt that it continues. An engine keeps them in slots, with a slot for each sequence that runs
and some for snapshots.

Shape letters: B sequences, N slots.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import NamedTuple, Protocol

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


class Places(NamedTuple):
    """Where the new tokens of a pass are in their sequences, on the device.

    Shape: sequence [T] and within [T], the new tokens of its sequence before it; first [B] of each
    sequence, and lengths [B]; all int32.
    """

    sequence: Tensor
    within: Tensor
    first: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, lengths: NDArray[np.int64], device: torch.device) -> Places:
        first = np.cumsum(lengths) - lengths
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        within = np.arange(len(sequence)) - first[sequence]
        arrays = (sequence, within, first, lengths)
        return cls(*(upload(one.astype(np.int32), device) for one in arrays))

    @classmethod
    def of_single_tokens(cls, count: int, device: torch.device) -> Places:
        """Return those of a decoding step, without the host."""
        number = torch.arange(count, dtype=torch.int32, device=device)
        return cls(number, torch.zeros_like(number), number, torch.ones_like(number))


class StateMemory(NamedTuple):
    """Where a kernel reads states before a pass, and writes those after it.

    `before` is None where all sequences begin with zeros, `after` where nobody needs them.
    Shape: before and after [N, ...], which may be one tensor; slots [B] int64; fresh [B] bool,
    which sequences begin with zeros all the same, or None for none.
    """

    before: Tensor | None
    after: Tensor | None
    slots: Tensor | None
    fresh: Tensor | None

    def for_kernels(self, unused: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tensors of the same dtypes in every pass, with `unused` for missing states."""
        slots, fresh = self.slots, self.fresh
        if slots is None:
            slots = torch.zeros_like(places.lengths, dtype=torch.int64)
        if fresh is None or self.before is None:
            fresh = torch.full_like(slots, self.before is None, dtype=torch.bool)
        before, after = (unused if one is None else one for one in (self.before, self.after))
        return before, after, slots, fresh


class SequenceStates(Protocol):
    """The states of a layer in one pass. Shape: lengths [B], new tokens of each sequence, at least
    1; of a state [B, ...].
    """

    lengths: NDArray[np.int64]

    @property
    def places(self) -> Places:
        """Where the new tokens are, for kernels; the same for all layers of the pass."""

    def memory(self, number: int) -> StateMemory:
        """Return where array `number` of the layer's states is, for kernels."""

    def begin(self, number: int) -> Tensor | None:
        """Return array `number` before the new tokens; None where no sequence has any before."""

    def end(self, number: int, state: Tensor) -> None:
        """Keep array `number` as it is after the new tokens."""


class PackedStates:
    """States of sequences that begin in a pass, or continue sequences `parents` of `before`."""

    def __init__(
        self,
        lengths: NDArray[np.int64],
        before: PackedStates | None = None,
        parents: NDArray[np.int64] | None = None,
        places: Places | None = None,
    ) -> None:
        self.lengths = lengths
        self._places = places
        self._before = before
        self._parents = parents
        self._ended: dict[int, Tensor] = {}

    @property
    def places(self) -> Places:
        assert self._places is not None, "kernels take packs of whole sequences alone"
        return self._places

    def memory(self, number: int) -> StateMemory:
        assert self._before is None, "kernels take packs of whole sequences alone"
        return StateMemory(None, None, None, None)

    def begin(self, number: int) -> Tensor | None:
        if self._before is None or self._parents is None:
            return None
        ended = self._before._ended[number]
        return ended.index_select(0, torch.from_numpy(self._parents).to(ended.device))

    def end(self, number: int, state: Tensor) -> None:
        self._ended[number] = state


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

    @cached_property
    def places(self) -> Places:
        device = self.index.device
        if self.lengths.max() == 1:
            return Places.of_single_tokens(len(self.lengths), device)
        return Places.of(self.lengths, device)


class SlotStates:
    """States of a layer in the slots of an engine. Shape: each array [N, ...]."""

    def __init__(self, arrays: tuple[Tensor, ...], slots: StateSlots) -> None:
        self.lengths = slots.lengths
        self._arrays = arrays
        self._slots = slots

    @property
    def places(self) -> Places:
        return self._slots.places

    def memory(self, number: int) -> StateMemory:
        array = self._arrays[number]
        return StateMemory(array, array, self._slots.index, self._slots.fresh)

    def begin(self, number: int) -> Tensor:
        state = self._arrays[number].index_select(0, self._slots.index)
        if self._slots.fresh is not None:
            # what another sequence left there is no part of it, NaN included
            state.masked_fill_(self._slots.fresh.view(-1, *(1,) * (state.dim() - 1)), 0)
        return state

    def end(self, number: int, state: Tensor) -> None:
        self._arrays[number].index_copy_(0, self._slots.index, state)


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

"""Attention of the engine: keys and values in pages, read back in the trainer's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.attention.backend import AttentionKernel, attention_backend
from spmd_rl.kernels.attention.coded_backend import CodedAttention, with_codes
from spmd_rl.kernels.attention.flash import FLASH_HEAD_DIMS
from spmd_rl.kernels.attention.token_attention import WHOLE, Reach, TokenAttention, attend
from spmd_rl.kernels.delta.states import (
    ALIGNMENT,
    SequenceStates,
    SlotStates,
    StateArray,
    StateSlots,
    state_arrays,
    state_bytes,
)
from spmd_rl.kernels.low_precision.kv_codes import KvCoding, KvExponents
from spmd_rl.kernels.rowwise.kv_write import KvSlots
from spmd_rl.kernels.rowwise.rope import qk_norm_rope_into
from spmd_rl.kernels.rowwise.rope_inputs import QkNorm, Rotary
from spmd_rl.kernels.runtime.upload import upload


class LayerPages(Protocol):
    """What one layer keeps of each token: arrays, each with this shape for a token.

    `queries_per_key` is above 0 if they are the keys and values of attention, each [K, D], to each
    of which so many query heads attend. With `latent_dim` they are keys alone, whose last so many
    elements are their values. `states` it keeps of each sequence.
    """

    @property
    def arrays(self) -> Sequence[tuple[int, ...]]: ...

    @property
    def queries_per_key(self) -> int: ...

    @property
    def states(self) -> tuple[StateArray, ...]: ...

    @property
    def latent_dim(self) -> int: ...


class KvCache:
    """Pages of every layer, of keys and values or other arrays; slot = page * page_size + offset.
    Beside them are `num_states` slots of the states that layers keep of sequences.

    `layers` says for each layer what it keeps, None for nothing. `layers` of the cache are then the
    tensors of each: of attention as `backend` lays them out, of others [num_pages, page_size, ...].
    The cache starts at zero, and it and products with its keys must stay finite: unused slots of a
    page are read, and their values are multiplied by exact zeros.
    `allocate` returns that many bytes, uint8 and zero. `split` is the size of the splits of keys in
    tokens, a multiple of the page (kv_splits.py); 0 for none. With `exponents`, it holds keys and
    values as codes of a byte, whose scales these are; then no layer keeps other arrays. One stream
    at a time may read the cache, because its calls share `tile_counter`.
    Raises: ConfigError where attention in splits cannot run, or for layers whose keys differ.
    """

    def __init__(
        self,
        layers: Sequence[LayerPages | None],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Callable[[int], Tensor] | None = None,
        split: int = 0,
        exponents: KvExponents | None = None,
        num_states: int = 0,
    ) -> None:
        keys = [one for one in layers if one is not None and one.queries_per_key]
        self.kv_heads, head_dim, self.heads_per_kv, self._latent_dim = _shape_of_keys(keys)
        backend = attention_backend(head_dim, dtype, device, split, self._latent_dim)
        self.backend = with_codes(backend, exponents, device)
        self.split = split
        self.page_size = page_size
        self.num_pages = num_pages
        self.device = device
        self.tile_counter = torch.zeros(1, dtype=torch.int32, device=device)
        layer_shape = self.backend.cache_shape(num_pages, page_size, self.kv_heads, head_dim)
        shapes = [(len(keys), 1 if self._latent_dim else 2, *layer_shape)]
        others = [one for one in layers if one and one.arrays and not one.queries_per_key]
        shapes += [(num_pages, page_size, *shape) for one in others for shape in one.arrays]
        sizes = [math.prod(shape) for shape in shapes]
        states = [() if one is None else one.states for one in layers]
        of_states = [state_bytes(one, num_states, dtype.itemsize) for one in states]
        page_dtype = dtype if exponents is None else torch.uint8
        assert not (others and exponents), "layers with other arrays hold no codes"
        in_pages = sum(sizes) * page_dtype.itemsize
        begin = -(-in_pages // ALIGNMENT) * ALIGNMENT if any(of_states) else in_pages
        self.num_bytes = begin + sum(of_states)
        memory = _zeros(self.num_bytes, device) if allocate is None else allocate(self.num_bytes)
        parts = memory[:in_pages].view(page_dtype).split(sizes)
        self.data, *self.others = (
            one.view(shape) for one, shape in zip(parts, shapes, strict=True)
        )
        self.states = [
            state_arrays(part, one, num_states, dtype)
            for part, one in zip(memory[begin:].split(of_states), states, strict=True)
        ]
        of_keys, of_others = iter(self.data), iter(self.others)
        self.layers: list[tuple[Tensor, ...]] = []
        for layer in layers:
            if layer is None or not layer.arrays:
                self.layers.append(())
            elif layer.queries_per_key:
                self.layers.append(tuple(next(of_keys)))
            else:
                self.layers.append(tuple(next(of_others) for _ in layer.arrays))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write new keys and values. Shape: slots [T]; of k and v [T', K, D] the first T rows."""
        self.backend.write(KvSlots(*self.keys_of(layer), slots), k, v)

    def keys_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a layer of attention, as `backend` lays them out."""
        keys, *values = self.layers[layer]
        return keys, values[0] if values else keys[..., -self._latent_dim :]

    @property
    def coding(self) -> KvCoding | None:
        return self.backend.coding if isinstance(self.backend, CodedAttention) else None

    def code_counts(self) -> dict[str, int]:
        """Return how many elements were stored as codes, and how many of these were beyond the
        largest; nothing where there are no codes. Blocks: for the device.
        """
        if self.coding is None:
            return {}
        stored, clipped = self.coding.counts.tolist()
        return {"num_coded": stored, "num_clipped": clipped}

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Overwrite each page of `targets` with that of `sources`, in all layers."""
        read, written = (upload(np.array(pages), self.device) for pages in (sources, targets))
        for layer in self.data:
            pages = self.backend.by_page(layer, self.num_pages)
            pages.index_copy_(1, written, pages.index_select(1, read))
        for pages in self.others:
            pages.index_copy_(0, written, pages.index_select(0, read))

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Overwrite each of the slots `targets` with that of `sources`, in all layers."""
        read, written = (upload(np.array(slots), self.device) for slots in (sources, targets))
        for arrays in self.states:
            for one in arrays:
                one.index_copy_(0, written, one.index_select(0, read))


def _shape_of_keys(keys: Sequence[LayerPages]) -> tuple[int, int, int, int]:
    """Return the key-value heads, their size, the query heads for each of them, and `latent_dim`.

    Raises: ConfigError unless all layers have the same, which the kernels of a step are made for.
    """
    shapes = {(*one.arrays[0], one.queries_per_key, one.latent_dim) for one in keys}
    if len(shapes) > 1:
        raise ConfigError("layers of attention whose key-value heads differ are not supported")
    heads, size, queries, latent_dim = next(iter(shapes), (1, FLASH_HEAD_DIMS[0], 1, 0))
    return heads, size, queries, latent_dim


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate zeros.

    On the CPU the system clears a page when it is first touched, which most never are.
    """
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))


class PagedAttention(TokenAttention):
    """Attention of a step's new tokens, each to its own history in the cache.

    A call writes the new keys and values into the cache first. Shape: q [T', H, D], k and v [T', K,
    D]: the new tokens of all sequences laid end to end, then padding up to the row tile.
    """

    def __init__(
        self,
        cache: KvCache,
        slots: Tensor,
        kernel: AttentionKernel,
        tables: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None = None,
        states: StateSlots | None = None,
    ) -> None:
        self.cache = cache
        self.slots = slots
        self.kernel = kernel
        self.states = states  # where layers of the cache have any
        # on the host: pages, tokens already in the cache, and new tokens of each sequence
        self.tables = tables

    @classmethod
    def chunks(
        cls,
        cache: KvCache,
        *,
        page_table: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        slots: NDArray[np.int64],
        states: NDArray[np.int64] | None = None,
    ) -> PagedAttention:
        """Prepare a step with any number of new tokens for each sequence.

        Shape: page_table [B, P] (any value where a sequence has no page; its first page stands in),
        starts [B] (tokens already in the cache), lengths [B] (new tokens, at least 1), slots [T]
        (where each new token's key goes), states [B] (each sequence's slot of states).
        """
        of_states = None
        if states is not None:
            of_states = StateSlots.of_chunks(states, starts, lengths, cache.device)
        kernel = cache.backend.chunks(
            page_table, starts, lengths, cache.page_size, cache.heads_per_kv, cache.tile_counter
        )
        tables = page_table, starts, lengths
        return cls(cache, upload(slots, cache.device), kernel, tables, of_states)

    @classmethod
    def decode(
        cls,
        cache: KvCache,
        *,
        pages: Tensor,
        num_keys: Tensor,
        slots: Tensor,
        states: Tensor | None = None,
    ) -> PagedAttention:
        """Prepare a step with one new token for each sequence; all state is on the GPU.

        Only for backends that fit CUDA graphs. Shape: pages [B, P], P whole splits if the cache has
        them, and num_keys [B] (the new token's included) int32; slots [B] int64, which write
        nothing where they are below 0; states [B] int64, each sequence's slot of states.
        """
        kernel = cache.backend.decode(pages, num_keys, cache.page_size, cache.tile_counter)
        of_states = None
        if states is not None:
            of_states = StateSlots(states, np.ones(len(states), np.int64), num_keys == 1)
        return cls(cache, slots, kernel, states=of_states)

    @classmethod
    def prefill(
        cls, cache: KvCache, *, pages: Tensor, num_keys: Tensor, bounds: Tensor, slots: Tensor
    ) -> PagedAttention:
        """Prepare a step with at most T new tokens, all state being on the GPU.

        Only for backends that fit CUDA graphs, and for sequences within one split. Shape: pages [B,
        P], num_keys [B] and bounds [B + 1] int32, where each sequence's new tokens begin and end;
        slots [T] int64, which write nothing where they are below 0.
        """
        kernel = cache.backend.prefill(pages, num_keys, bounds, len(slots))
        return cls(cache, slots, kernel)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, reach: Reach = WHOLE
    ) -> Tensor:
        self.cache.write(layer, self.slots, k, v)
        return self.read(layer, q, reach)

    def rotate_and_attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norm: QkNorm,
        rotary: Rotary,
        reach: Reach = WHOLE,
    ) -> Tensor:
        if torch.is_grad_enabled() or not self.cache.backend.fuses_write:
            return super().rotate_and_attend(layer, q, k, v, norm, rotary, reach)
        target = KvSlots(*self.cache.keys_of(layer), self.slots)
        coding = self.cache.coding
        return self.read(layer, qk_norm_rope_into(q, k, v, norm, rotary, target, coding), reach)

    def history(self, layer: int, *rows: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        pages, device = self.cache.layers[layer], self.slots.device
        for array, new in zip(pages, rows, strict=True):
            array.flatten(0, 1)[self.slots] = new[: len(self.slots)].to(array.dtype)
        assert self.tables is not None, "a layer with pages of its own is in no graph"
        page_table, starts, lengths = self.tables
        first = 0
        for table, start, length in zip(page_table, starts.tolist(), lengths.tolist(), strict=True):
            own = torch.from_numpy(table[: -(-(start + length) // self.cache.page_size)]).to(device)
            so_far = [array[own].flatten(0, 1)[: start + length] for array in pages]
            yield slice(first, first + length), so_far
            first += length

    def sequences(self, layer: int) -> Iterator[tuple[slice, SequenceStates]]:
        assert self.states is not None, "a step of layers with states has slots of them"
        rows = slice(0, int(self.states.lengths.sum()))
        yield rows, SlotStates(self.cache.states[layer], self.states)

    def read(self, layer: int, q: Tensor, reach: Reach) -> Tensor:
        """Attend to what is in the cache, the new keys and values included."""
        return attend(self.kernel, q, *self.cache.keys_of(layer), reach)

"""Prefill steps as CUDA graphs: a few hundred tokens run faster than the host can launch them.

A graph has room for a number of tokens in a number of sequences. Unused room is padding: nobody
attends to it, its K/V is written nowhere, and its results are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels import KvCache, PagedAttention
from spmd_rl.kernels.moe.kept_routes import kept_routes
from spmd_rl.kernels.moe.route_hash import RouteHash, hashed_routes
from spmd_rl.kernels.moe.rows_in_use import using_rows
from spmd_rl.kernels.runtime.cuda_graph import GraphMemory, record
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.native.graph_inputs import GraphInputs, InputFields

# Numbers of tokens. Longer steps take the GPU longer than their launches take the host.
PREFILL_SIZES = (256, 512, 1024, 2048)
TOKENS_PER_SEQUENCE = 16
NO_SLOT = -1


class PrefillChunks(NamedTuple):
    """New tokens of several sequences, end to end, with their positions and slots in the cache.

    Sequence b has `starts[b]` tokens in the cache before, and `lengths[b]` new ones; it is that of
    row `rows[b]`.
    Entries of `pages` past a sequence's own pages may hold anything.
    Shape: tokens, positions and slots [T]; starts, lengths, rows [B]; pages [B, P]; all
    int64.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    pages: NDArray[np.int64]
    rows: NDArray[np.int64]


class PassedTokens(NamedTuple):
    """What a forward pass gives of its tokens: hidden states, and of mixtures their routes.

    `routes` is None where none are recorded. Shape: hidden [T, C], routes [T, W].
    """

    hidden: Tensor
    hashed: RouteHash
    routes: Tensor | None

    @staticmethod
    def of(run: Callable[[], Tensor], route_dtype: torch.dtype | None) -> PassedTokens:
        """Return what `run` computes; routes are recorded if they have a dtype."""
        if route_dtype is None:
            with hashed_routes() as hashed:
                return PassedTokens(run(), hashed, None)
        with hashed_routes() as hashed, kept_routes() as kept:
            hidden = run()
        return PassedTokens(hidden, hashed, kept.joined(route_dtype))


class PrefillGraphs:
    """Graphs over one cache, recorded at first use. Ranks: any, each on its own."""

    def __init__(
        self, model: CausalLM, cache: KvCache, max_pages: int, memory: GraphMemory
    ) -> None:
        """`max_pages` is the number of pages that a sequence may have."""
        self._model = model
        self._cache = cache
        self._max_pages = max_pages
        self._memory = memory
        self._graphs: dict[tuple[int, torch.dtype | None], _PrefillGraph] = {}

    @property
    def num_recorded(self) -> int:
        return len(self._graphs)

    def hidden_states(
        self, chunks: PrefillChunks, route_dtype: torch.dtype | None = None
    ) -> PassedTokens | None:
        """Queue the tokens and return their hidden states and routes, if a graph has the room.

        No graph has room for a sequence with several attention splits. The result is valid until
        the next launch of any graph. Routes are recorded if they have a dtype.
        Shape: of T' >= T rows.
        """
        if 0 < self._cache.split < (chunks.starts + chunks.lengths).max():
            return None
        num_tokens = max(len(chunks.tokens), len(chunks.lengths) * TOKENS_PER_SEQUENCE)
        size = next((size for size in PREFILL_SIZES if num_tokens <= size), None)
        if size is None:
            return None
        key = size, route_dtype
        if key not in self._graphs:
            self._graphs[key] = self._record(size, chunks, route_dtype)
        return self._graphs[key].replay(chunks)

    def _record(
        self, size: int, chunks: PrefillChunks, route_dtype: torch.dtype | None
    ) -> _PrefillGraph:
        graph = _PrefillGraph(size, self._max_pages, self._cache.device)
        graph.upload(chunks)
        inputs = graph.inputs.tensors
        graph.cuda_graph, graph.outputs = record(
            lambda: self._compute(inputs, route_dtype), self._memory
        )
        return graph

    def _compute(self, inputs: dict[str, Tensor], route_dtype: torch.dtype | None) -> PassedTokens:
        """Do the work of one step, as it is recorded."""
        attend = PagedAttention.prefill(
            self._cache,
            pages=inputs["pages"],
            num_keys=inputs["num_keys"],
            bounds=inputs["bounds"],
            slots=inputs["slots"],
        )
        with using_rows(inputs["slots"]):
            given = inputs["tokens"], inputs["positions"], attend
            return PassedTokens.of(lambda: self._model(*given), route_dtype)


class _PrefillGraph:
    """One graph with the inputs of its chunks.

    `cuda_graph` and `outputs` are set once it is recorded.
    """

    cuda_graph: torch.cuda.CUDAGraph
    outputs: PassedTokens

    def __init__(self, size: int, max_pages: int, device: torch.device) -> None:
        self._max_pages = max_pages
        batch = size // TOKENS_PER_SEQUENCE
        fields: InputFields = {
            "tokens": ((size,), np.int64),
            "positions": ((size,), np.int64),
            "slots": ((size,), np.int64),
            "pages": ((batch, max_pages), np.int32),
            "num_keys": ((batch,), np.int32),
            "bounds": ((batch + 1,), np.int32),
        }
        self.inputs = GraphInputs(fields, device)

    def replay(self, chunks: PrefillChunks) -> PassedTokens:
        self.upload(chunks)
        self.cuda_graph.replay()
        return self.outputs

    def upload(self, chunks: PrefillChunks) -> None:
        num_tokens = len(chunks.tokens)
        missing_columns = self._max_pages - chunks.pages.shape[1]
        arrays = {
            "tokens": chunks.tokens,
            "positions": chunks.positions,
            "slots": chunks.slots,
            "pages": np.pad(chunks.pages, ((0, 0), (0, missing_columns))),
            "num_keys": chunks.starts + chunks.lengths,
            "bounds": np.array([0, *np.cumsum(chunks.lengths)]),
        }
        self.inputs.upload(arrays, {"slots": NO_SLOT, "bounds": num_tokens})

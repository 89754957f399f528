"""Steps of prompts as CUDA graphs: a few hundred tokens take the GPU less time than their launches
take the host.

A graph has room for so many tokens in so many sequences. Tokens that no sequence fills are padding,
which nobody attends to and whose K/V is written nowhere; what is computed for them is dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels import KvCache, PagedAttention
from spmd_rl.kernels.runtime.cuda_graph import GraphMemory, record
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.native.graph_inputs import Fields, GraphInputs

SIZES = (256, 512, 1024, 2048)  # tokens; above, launching is the smaller part
TOKENS_PER_SEQUENCE = 16
NOWHERE = -1


class Chunks(NamedTuple):
    """New tokens of several sequences, laid end to end, with their positions and their slots in the
    cache.

    Shape: tokens, positions and slots [T] int64; starts, lengths [B] and pages [B, P] int64: tokens
    in the cache before, new ones, and the pages of the sequence, of which a table's entries past it
    may hold anything.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    pages: NDArray[np.int64]


class PrefillGraphs:
    """Graphs over one cache, recorded at first use. Ranks: any, each on its own."""

    def __init__(
        self, model: CausalLM, cache: KvCache, max_pages: int, memory: GraphMemory
    ) -> None:
        """`max_pages` is how many pages a sequence may have."""
        self._model = model
        self._cache = cache
        self._max_pages = max_pages
        self._memory = memory
        self._recorded: dict[int, _Recorded] = {}

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def hidden(self, chunks: Chunks) -> Tensor | None:
        """Queue the tokens and return their hidden states [T', C], T' >= T, or None where no graph
        has the room.

        They are valid until the next launch of any graph. Where a sequence has several splits, no
        graph has the room.
        """
        if 0 < self._cache.split < (chunks.starts + chunks.lengths).max():
            return None
        num_tokens = max(len(chunks.tokens), len(chunks.lengths) * TOKENS_PER_SEQUENCE)
        size = next((size for size in SIZES if num_tokens <= size), None)
        if size is None:
            return None
        if size not in self._recorded:
            self._recorded[size] = _Recorded(self, size, chunks)
        return self._recorded[size].replay(chunks)

    def compute(self, inputs: dict[str, Tensor]) -> Tensor:
        """The work of one step, as it is recorded."""
        attend = PagedAttention.prefill(
            self._cache,
            pages=inputs["pages"],
            num_keys=inputs["num_keys"],
            bounds=inputs["bounds"],
            slots=inputs["slots"],
        )
        return self._model(inputs["tokens"], inputs["positions"], attend)


class _Recorded:
    """One graph with the memory it reads its chunks from."""

    def __init__(self, graphs: PrefillGraphs, size: int, first: Chunks) -> None:
        self._max_pages = graphs._max_pages
        batch = size // TOKENS_PER_SEQUENCE
        fields: Fields = {
            "tokens": ((size,), np.int64),
            "positions": ((size,), np.int64),
            "slots": ((size,), np.int64),
            "pages": ((batch, self._max_pages), np.int32),
            "num_keys": ((batch,), np.int32),
            "bounds": ((batch + 1,), np.int32),
        }
        self._staged = GraphInputs(fields, graphs._cache.data.device)
        self._upload(first)
        self._graph, self._hidden = record(
            lambda: graphs.compute(self._staged.tensors), graphs._memory
        )

    def replay(self, chunks: Chunks) -> Tensor:
        self._upload(chunks)
        self._graph.replay()
        return self._hidden

    def _upload(self, chunks: Chunks) -> None:
        num_tokens = len(chunks.tokens)
        arrays = {
            "tokens": chunks.tokens,
            "positions": chunks.positions,
            "slots": chunks.slots,
            "pages": np.pad(chunks.pages, ((0, 0), (0, self._max_pages - chunks.pages.shape[1]))),
            "num_keys": chunks.starts + chunks.lengths,
            "bounds": np.array([0, *np.cumsum(chunks.lengths)]),
        }
        self._staged.upload(arrays, {"slots": NOWHERE, "bounds": num_tokens})

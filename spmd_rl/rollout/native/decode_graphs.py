"""Decoding steps as CUDA graphs: recorded once for each size of batch, replayed without a word from
the host.

A graph reads its rows' newest tokens, draws the next ones, and leaves them where the next replay
reads them. So the host uploads something only when the batch or its pages change, and may launch a
step before it has seen the tokens of the last one. Entries that no row fills are padding: their K/V
is written nowhere, what is drawn for them is dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels import KvCache, PagedAttention
from spmd_rl.kernels.runtime.cuda_graph import GraphMemory, record
from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.native.graph_inputs import Fields, GraphInputs
from spmd_rl.rollout.native.sequence_table import SequenceTable

Draw = Callable[..., tuple[Tensor, Tensor]]  # takes what `sample_and_score` takes
TURNS = 2  # a step may be launched before the host has taken what the step before it drew


def batch_sizes(largest: int) -> list[int]:
    """Sizes to record: close together where a step is short, and `largest` itself."""
    sizes = [1, 2, 4, 8, *range(16, 64, 16), *range(64, 256, 32), *range(256, largest, 64)]
    return [size for size in sizes if size < largest] + [largest]


def table_width(num_pages: int, max_pages: int, split_pages: int) -> int:
    """Columns of a graph's page table: all; with splits, those of as many splits as `num_pages`
    takes, rounded up to a power of two and no more than `max_pages` takes."""
    if split_pages == 0:
        return max_pages
    splits, most = -(-num_pages // split_pages), -(-max_pages // split_pages)
    return min(1 << (splits - 1).bit_length(), most) * split_pages


class _Pinned:
    """Memory of the host that graphs write: what each of the last steps drew.

    Shape: tokens [TURNS, N] int64, logprobs [TURNS, N] fp32.
    """

    def __init__(self, num_rows: int) -> None:
        self.tokens = torch.empty(TURNS, num_rows, dtype=torch.int64, pin_memory=True)
        self.logprobs = torch.empty(TURNS, num_rows, dtype=torch.float32, pin_memory=True)


class DecodeGraphs:
    """Graphs over one cache. Ranks: any, each on its own."""

    def __init__(
        self, model: CausalLM, cache: KvCache, rows: SequenceTable, memory: GraphMemory, draw: Draw
    ) -> None:
        self._model = model
        self._draw = draw
        self._cache = cache
        self._rows = rows
        self._sizes = batch_sizes(rows.num_rows)
        self.device = cache.data.device
        self._newest = torch.zeros(rows.num_rows + 1, dtype=torch.int64, device=self.device)
        self._for_host = _Pinned(rows.num_rows)
        self.turn = 0
        # the ticket whose newest token is there
        self._remembered = np.zeros(rows.num_rows, dtype=np.int64)
        self._recorded: dict[tuple[int, int, tuple[str, ...]], _Recorded] = {}
        self._latest: _Recorded | None = None
        self._memory = memory

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def launch(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Queue one decoding step of `rows`, whose newest tokens were drawn here, remembered, or
        are known to the host.

        Shape: rows [M]; returns where the host finds tokens [M] int64 and log-probs [M] fp32 once
        the step has run, until the next but one is launched.
        """
        state = self._rows
        fresh = rows[self._remembered[rows] != state.ticket[rows]]
        if len(fresh):
            newest = state.tokens[fresh, state.length[fresh] - 1].astype(np.int64)
            self.remember(fresh, upload(newest, self.device))
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        split_pages = self._cache.split // self._cache.page_size
        width = table_width(int(state.num_pages[rows].max()), state.pages.shape[1], split_pages)
        key = size, width, state.filters(rows)
        if key not in self._recorded:
            self._recorded[key] = _Recorded(self, *key)
        recorded = self._recorded[key]
        if recorded is not self._latest:
            recorded.forget()  # its rows have moved on in other graphs
            self._latest = recorded
        recorded.replay(rows, self.turn)
        now, self.turn = self.turn, (self.turn + 1) % TURNS
        return self._for_host.tokens[now, : len(rows)], self._for_host.logprobs[now, : len(rows)]

    def remember(self, rows: NDArray[np.int64], tokens: Tensor) -> None:
        """`tokens` [M] are now the newest of `rows` [M]."""
        self._newest.index_copy_(0, upload(rows, self.device), tokens)
        self._remembered[rows] = self._rows.ticket[rows]

    def step(self, inputs: dict[str, Tensor], filters: tuple[str, ...]) -> None:
        """The work of one step, as it is recorded."""
        from spmd_rl.kernels.attention.decode_inputs_triton import decode_inputs
        from spmd_rl.kernels.vocab.decode_outputs_triton import decode_outputs

        now = decode_inputs(
            self._newest,
            inputs["rows"],
            inputs["positions"],
            inputs["answer_starts"],
            inputs["pages"],
            self._cache.page_size,
        )
        attend = PagedAttention.decode(
            self._cache, pages=inputs["pages"], num_keys=now.num_keys, slots=now.slots
        )
        hidden = self._model(now.tokens, now.positions, attend)
        tokens, logprobs = self._draw(
            self._model.logits(hidden),
            inputs["inv_temperature"],
            inputs["bases"],
            now.within,
            greedy=inputs["greedy"],
            **{name: inputs[name] for name in filters},
        )
        host = self._for_host
        decode_outputs(
            tokens,
            logprobs,
            inputs["rows"],
            self._newest,
            host.tokens,
            host.logprobs,
            inputs["turn"],
        )

    def record(self, inputs: dict[str, Tensor], filters: tuple[str, ...]) -> torch.cuda.CUDAGraph:
        return record(lambda: self.step(inputs, filters), self._memory)[0]


class _Recorded:
    """One graph with the memory it reads its batch from."""

    def __init__(
        self, graphs: DecodeGraphs, size: int, width: int, filters: tuple[str, ...]
    ) -> None:
        self._state = graphs._rows
        self._width = width
        fields: Fields = {
            "turn": ((1,), np.int64),
            "rows": ((size,), np.int64),
            "positions": ((size,), np.int64),
            "answer_starts": ((size,), np.int64),
            "bases": ((size,), np.int64),
            "top_k": ((size,), np.int64),
            "top_p": ((size,), np.float32),
            "min_p": ((size,), np.float32),
            "inv_temperature": ((size,), np.float32),
            "greedy": ((size,), np.bool_),
            "pages": ((size, width), np.int32),
        }
        self._batch: tuple[bytes, ...] = ()
        self._staged = GraphInputs(fields, graphs.device)
        self._upload(np.zeros(0, dtype=np.int64), graphs.turn)
        self._graph = graphs.record(self._staged.tensors, filters)

    def forget(self) -> None:
        """What was uploaded is out of date."""
        self._batch = ()

    def replay(self, rows: NDArray[np.int64], turn: int) -> None:
        state = self._state
        batch = (rows.tobytes(), state.ticket[rows].tobytes(), state.num_pages[rows].tobytes())
        if batch != self._batch:
            self._upload(rows, turn)
            self._batch = batch
        self._graph.replay()

    def _upload(self, rows: NDArray[np.int64], turn: int) -> None:
        state = self._state
        pages = state.pages[rows, : self._width]
        columns: dict[str, NDArray[Any]] = {
            "turn": np.array([turn]),
            "rows": rows,
            "positions": state.length[rows] - 1,
            "answer_starts": state.prompt_length[rows],
            "bases": state.bases(rows),
            "top_k": state.top_k[rows],
            "top_p": state.top_p[rows],
            "min_p": state.min_p[rows],
            "inv_temperature": state.inv_temperature[rows],
            "greedy": state.greedy[rows],
            "pages": np.pad(pages, ((0, 0), (0, self._width - pages.shape[1]))),
        }
        self._staged.upload(columns, {"rows": state.num_rows, "inv_temperature": 1, "top_p": 1})

"""Decoding steps as CUDA graphs, recorded once for each batch size.

A graph reads its rows' newest tokens, draws the next ones, and leaves them where the next replay
reads them. So the host uploads inputs only when the batch or its pages change. It may also launch a
step before it has seen the tokens of the last one. A batch smaller than its graph is padded: K/V of
padding is written nowhere, and its tokens are dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels import KvCache, PagedAttention
from spmd_rl.kernels.moe.route_hash import ROUTES
from spmd_rl.kernels.moe.rows_in_use import using_rows
from spmd_rl.kernels.runtime.cuda_graph import GraphMemory, record
from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.kernels.vocab.kept_words import EncodedRows, KeptRows
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.native.graph_inputs import GraphInputs, InputFields
from spmd_rl.rollout.native.joint.joint_steps import JointSteps
from spmd_rl.rollout.native.prefill_graphs import PassedTokens
from spmd_rl.rollout.native.sampled_tokens import NO_COLUMNS, SampledOnDevice
from spmd_rl.rollout.native.sequence_table import SequenceTable
from spmd_rl.rollout.native.tp.head_draw import HeadDraw

# Two, since a step may be launched before the host has read the output of the step before it.
NUM_OUTPUT_BUFFERS = 2


def batch_sizes(largest: int) -> list[int]:
    """Return the sizes to record: close together where a step is short, and `largest` itself."""
    sizes = [1, 2, 4, 8, *range(16, 64, 16), *range(64, 256, 32), *range(256, largest, 64)]
    return [size for size in sizes if size < largest] + [largest]


def page_table_width(num_pages: int, max_pages: int, split_pages: int) -> int:
    """Return the columns of a graph's page table, for rows of up to `num_pages` pages.

    Without attention splits it is `max_pages`. With splits, it is the pages of the splits needed,
    their number rounded up to a power of two, but no more than `max_pages` needs.
    """
    if split_pages == 0:
        return max_pages
    num_splits, max_splits = -(-num_pages // split_pages), -(-max_pages // split_pages)
    return min(1 << (num_splits - 1).bit_length(), max_splits) * split_pages


class _OutputBuffers:
    """Pinned host memory that graphs write: the tokens and log-probs of the last steps.

    A mixture's routes are hashed (kernels/moe/route_hash.py).
    Shape: tokens [NUM_OUTPUT_BUFFERS, N] int64, logprobs [NUM_OUTPUT_BUFFERS, N] fp32, routes
    [NUM_OUTPUT_BUFFERS, N] int32, or None without experts.
    """

    def __init__(self, num_rows: int, has_experts: bool) -> None:
        shape = NUM_OUTPUT_BUFFERS, num_rows
        self.tokens = torch.empty(shape, dtype=torch.int64, pin_memory=True)
        self.logprobs = torch.empty(shape, dtype=torch.float32, pin_memory=True)
        self.routes: Tensor | None = None
        if has_experts:
            self.routes = torch.empty(shape, dtype=torch.int32, pin_memory=True)

    def columns(self, buffer: int, num_rows: int) -> Mapping[str, Tensor]:
        """Return further values of the tokens in a buffer."""
        return NO_COLUMNS if self.routes is None else {ROUTES: self.routes[buffer, :num_rows]}


class _Variant(NamedTuple):
    """A kind of batch that has a graph of its own.

    `width` is the number of pages that a row may have, `filters` are the names of those in use.
    With `replays`, the sets that they keep are written to the host too. Routes are recorded if
    they have a dtype.
    """

    size: int
    width: int
    filters: tuple[str, ...]
    replays: bool
    route_dtype: torch.dtype | None


class DecodeGraphs:
    """Graphs over one cache. Ranks: any, each on its own; with `joint`, as it says."""

    def __init__(
        self,
        model: CausalLM,
        cache: KvCache,
        table: SequenceTable,
        memory: GraphMemory,
        draw: HeadDraw,
        joint: JointSteps | None = None,
    ) -> None:
        self._model = model
        self._draw = draw
        self._joint = joint
        self._cache = cache
        self._table = table
        self._batch_sizes = batch_sizes(table.num_rows)
        self._device = cache.device
        # The newest token of each row, and of the row that stands for padding.
        self._newest_tokens = torch.zeros(
            table.num_rows + 1, dtype=torch.int64, device=self._device
        )
        # The sequence in each row when its newest token was stored.
        self._newest_sequence_id = np.zeros(table.num_rows, dtype=np.int64)
        self._output_buffers = _OutputBuffers(table.num_rows, model.spec.num_experts > 0)
        self._encoded: EncodedRows | None = None  # pinned too, once a batch replays its filters
        self._next_buffer = 0
        self._graphs: dict[_Variant, _DecodeGraph] = {}
        self._last_graph: _DecodeGraph | None = None
        self._memory = memory

    @property
    def num_recorded(self) -> int:
        return len(self._graphs)

    def launch(
        self,
        rows: NDArray[np.int64],
        route_dtype: torch.dtype | None = None,
        room: int = 0,
    ) -> SampledOnDevice:
        """Queue one decoding step of `rows`; the host need not have their newest tokens.

        The graph has room for at least `room` rows. Without any row, all of them are padding.

        The results are views of host memory. They are valid once the step has run, until the
        second launch after this one. Routes are recorded if they have a dtype: they are on the
        device until the next launch.
        Shape: rows [M].
        """
        table = self._table
        new = rows[self._newest_sequence_id[rows] != table.sequence_id[rows]]
        if len(new):
            tokens = table.tokens[new, table.length[new] - 1].astype(np.int64)
            self.set_newest_tokens(new, upload(tokens, self._device))
        graph = self._graph_for(rows, route_dtype, room)
        if graph is not self._last_graph:
            graph.invalidate_inputs()  # the rows have moved on in other graphs
            self._last_graph = graph
        graph.replay(rows, self._next_buffer)
        buffer = self._next_buffer
        self._next_buffer = (buffer + 1) % NUM_OUTPUT_BUFFERS
        output, kept, num_rows = self._output_buffers, None, len(rows)
        if graph.variant.replays and self._encoded is not None:
            kept = self._encoded.step(buffer, num_rows)
        return SampledOnDevice(
            output.tokens[buffer, :num_rows],
            output.logprobs[buffer, :num_rows],
            kept,
            output.columns(buffer, num_rows),
            None if graph.routes is None else graph.routes[:num_rows],
        )

    def set_newest_tokens(self, rows: NDArray[np.int64], tokens: Tensor) -> None:
        """Store `tokens` [M] as the newest of `rows` [M], for the next replay."""
        self._newest_tokens.index_copy_(0, upload(rows, self._device), tokens)
        self._newest_sequence_id[rows] = self._table.sequence_id[rows]

    def _graph_for(
        self, rows: NDArray[np.int64], route_dtype: torch.dtype | None, room: int
    ) -> _DecodeGraph:
        """Return the graph for the size, context and filters of `rows`; record it at first use."""
        table = self._table
        size = self._batch_sizes[bisect_left(self._batch_sizes, max(len(rows), room))]
        split_pages = self._cache.split // self._cache.page_size
        num_pages, max_pages = int(table.num_pages[rows].max(initial=1)), table.pages.shape[1]
        width = page_table_width(num_pages, max_pages, split_pages)
        filters = table.active_filters(rows)
        replays = bool(filters) and bool(table.replays[rows].any())
        variant = _Variant(size, width, filters, replays, route_dtype)
        if variant not in self._graphs:
            self._graphs[variant] = self._record(variant)
        return self._graphs[variant]

    def _record(self, variant: _Variant) -> _DecodeGraph:
        graph = _DecodeGraph(self._table, variant, self._device)
        graph.upload(np.zeros(0, dtype=np.int64), self._next_buffer)
        inputs = graph.inputs.tensors
        if variant.replays and self._encoded is None:
            shape = NUM_OUTPUT_BUFFERS, self._table.num_rows
            self._encoded = EncodedRows.empty(shape, self._model.spec.vocab_size, None)
        work = partial(self._compute, inputs, variant)
        recording = record if self._joint is None else self._joint.record
        graph.cuda_graph, graph.routes = recording(work, self._memory)
        return graph

    def _compute(self, inputs: dict[str, Tensor], variant: _Variant) -> Tensor | None:
        """Do the work of one step, as it is recorded, and return its routes."""
        from spmd_rl.kernels.attention.decode_inputs_triton import decode_inputs
        from spmd_rl.kernels.vocab.decode_outputs_triton import decode_outputs
        from spmd_rl.kernels.vocab.kept_sets_triton import encode_rows

        batch = decode_inputs(
            self._newest_tokens,
            inputs["rows"],
            inputs["positions"],
            inputs["answer_starts"],
            inputs["pages"],
            self._cache.page_size,
        )
        attend = PagedAttention.decode(
            self._cache,
            pages=inputs["pages"],
            num_keys=batch.num_keys,
            slots=batch.slots,
            states=inputs["rows"],
        )
        with using_rows(batch.slots):
            given = batch.tokens, batch.positions, attend
            passed, kept = PassedTokens.of(lambda: self._model(*given), variant.route_dtype), None
        if variant.replays:
            kept = KeptRows.empty(inputs["replays"], self._model.spec.vocab_size)
        tokens, logprobs = self._draw(
            passed.hidden,
            inputs["inv_temperature"],
            inputs["random_bases"],
            batch.within,
            greedy=inputs["greedy"],
            **{name: inputs[name] for name in variant.filters},
            kept=kept,
        )
        if kept is not None and self._encoded is not None:
            encode_rows(kept, self._encoded, inputs["buffer"])
        decode_outputs(
            tokens,
            logprobs,
            inputs["rows"],
            self._newest_tokens,
            self._output_buffers.tokens,
            self._output_buffers.logprobs,
            inputs["buffer"],
            passed.hashed.state,
            self._output_buffers.routes,
        )
        return passed.routes


class _DecodeGraph:
    """One graph with the inputs of its batch.

    `cuda_graph` and `routes`, which it writes if they are recorded, are set once it is recorded.
    """

    cuda_graph: torch.cuda.CUDAGraph
    routes: Tensor | None

    def __init__(self, table: SequenceTable, variant: _Variant, device: torch.device) -> None:
        self._table = table
        self.variant = variant
        size, width = variant.size, variant.width
        fields: InputFields = {
            "buffer": ((1,), np.int64),  # of the output; each replay counts it on
            "rows": ((size,), np.int64),
            "positions": ((size,), np.int64),
            "answer_starts": ((size,), np.int64),
            "random_bases": ((size,), np.int64),
            "top_k": ((size,), np.int64),
            "top_p": ((size,), np.float32),
            "min_p": ((size,), np.float32),
            "inv_temperature": ((size,), np.float32),
            "greedy": ((size,), np.bool_),
            "replays": ((size,), np.bool_),
            "pages": ((size, width), np.int32),
        }
        self._uploaded: tuple[bytes, ...] = ()
        self.inputs = GraphInputs(fields, device)

    def invalidate_inputs(self) -> None:
        """Make the next replay upload its inputs."""
        self._uploaded = ()

    def replay(self, rows: NDArray[np.int64], buffer: int) -> None:
        """Queue a step of `rows`; `buffer` counts the output buffers."""
        table = self._table
        batch = (
            rows.tobytes(),
            table.sequence_id[rows].tobytes(),
            table.num_pages[rows].tobytes(),
        )
        if batch != self._uploaded:
            self.upload(rows, buffer)
            self._uploaded = batch
        self.cuda_graph.replay()

    def upload(self, rows: NDArray[np.int64], buffer: int) -> None:
        table = self._table
        width = self.variant.width
        pages = table.pages[rows, :width]
        arrays: dict[str, NDArray[Any]] = {
            "buffer": np.array([buffer]),
            "rows": rows,
            "positions": table.length[rows] - 1,
            "answer_starts": table.prompt_length[rows],
            "random_bases": table.random_bases(rows),
            "top_k": table.top_k[rows],
            "top_p": table.top_p[rows],
            "min_p": table.min_p[rows],
            "inv_temperature": table.inv_temperature[rows],
            "greedy": table.greedy[rows],
            "replays": table.replays[rows],
            "pages": np.pad(pages, ((0, 0), (0, width - pages.shape[1]))),
        }
        self.inputs.upload(arrays, {"rows": table.num_rows, "inv_temperature": 1, "top_p": 1})

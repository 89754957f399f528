"""Decoding steps as CUDA graphs: recorded once for each size of batch, replayed without a word from the host.

A graph reads its rows' newest tokens, draws the next ones, and leaves them where the next replay reads them. So the
host uploads something only when the batch or its pages change, and may launch a step before it has seen the tokens of
the last one. Entries that no row fills are padding: their K/V is written nowhere, what is drawn for them is dropped.
"""

from __future__ import annotations

from bisect import bisect_left
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels import KvCache, PagedAttention, sample_and_score
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.native.rows import Rows

ALIGN_BYTES = 16


def batch_sizes(largest: int) -> list[int]:
    """Sizes to record: close together where a step is short, and `largest` itself."""
    sizes = [1, 2, 4, 8, *range(16, 64, 16), *range(64, 256, 32), *range(256, largest, 64)]
    return [size for size in sizes if size < largest] + [largest]


class DecodeGraphs:
    """Graphs over one cache. Ranks: any, each on its own."""

    def __init__(self, model: CausalLM, cache: KvCache, rows: Rows) -> None:
        self._model = model
        self._cache = cache
        self._rows = rows
        self._sizes = batch_sizes(rows.num_rows)
        self._newest = torch.zeros(rows.num_rows + 1, dtype=torch.int64, device=cache.data.device)
        self._recorded: dict[tuple[int, bool], _Recorded] = {}
        self._latest: _Recorded | None = None
        self._memory = torch.cuda.graph_pool_handle()

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def launch(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Queue one decoding step of `rows`; their newest tokens must have been drawn here or remembered.

        Shape: rows [M]; returns tokens [M] int64 and log-probs [M] fp32, valid until the next launch.
        """
        state = self._rows
        filtered = bool(((state.top_k[rows] != 0) | (state.top_p[rows] != 1) | (state.min_p[rows] != 0)).any())
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        if (size, filtered) not in self._recorded:
            self._recorded[size, filtered] = _Recorded(self, size, filtered)
        recorded = self._recorded[size, filtered]
        if recorded is not self._latest:
            recorded.forget()  # its rows have moved on in other graphs
            self._latest = recorded
        tokens, logprobs = recorded.replay(rows)
        return tokens[: len(rows)], logprobs[: len(rows)]

    def remember(self, rows: NDArray[np.int64], tokens: Tensor) -> None:
        """`tokens` [M] are now the newest of `rows` [M]."""
        self._newest.index_copy_(0, torch.from_numpy(rows).to(tokens.device), tokens)

    def step(self, inputs: dict[str, Tensor], filtered: bool) -> tuple[Tensor, Tensor]:
        """The work of one step, as it is recorded."""
        from spmd_rl.kernels.decode_inputs_triton import decode_inputs

        now = decode_inputs(
            self._newest,
            inputs["rows"],
            inputs["positions"],
            inputs["answer_starts"],
            inputs["pages"],
            self._cache.page_size,
        )
        attend = PagedAttention.decode(self._cache, pages=inputs["pages"], num_keys=now.num_keys, slots=now.slots)
        hidden = self._model(now.tokens, now.positions, attend)
        filters = {name: inputs[name] for name in ("top_k", "top_p", "min_p")} if filtered else {}
        tokens, logprobs = sample_and_score(
            self._model.logits(hidden),
            inputs["inv_temperature"],
            inputs["bases"],
            now.within,
            greedy=inputs["greedy"],
            **filters,
        )
        self._newest.index_copy_(0, inputs["rows"], tokens)
        return tokens, logprobs

    def record(self, inputs: dict[str, Tensor], filtered: bool) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
        self.step(inputs, filtered)  # compiles what is not compiled yet
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            outputs = self.step(inputs, filtered)
        return graph, outputs


class _Recorded:
    """One graph with the memory it reads its batch from."""

    def __init__(self, graphs: DecodeGraphs, size: int, filtered: bool) -> None:
        state = self._state = graphs._rows
        width = state.pages.shape[1]
        self._fields: dict[str, tuple[tuple[int, ...], type]] = {
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
        num_bytes = sum(_aligned(shape, dtype) for shape, dtype in self._fields.values())
        self._device_memory = torch.empty(num_bytes, dtype=torch.uint8, device=graphs._newest.device)
        self._upload(np.zeros(0, dtype=np.int64))
        self._inputs = {name: part.view(shape) for name, part, shape in self._parts(self._device_memory)}
        self._graph, self._outputs = graphs.record(self._inputs, filtered)

    def forget(self) -> None:
        """What was uploaded is out of date."""
        self._batch = ()

    def replay(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        state = self._state
        batch = (rows.tobytes(), state.ticket[rows].tobytes(), state.num_pages[rows].tobytes())
        if batch != self._batch:
            self._upload(rows)
            self._batch = batch
        self._graph.replay()
        return self._outputs

    def _upload(self, rows: NDArray[np.int64]) -> None:
        staged = torch.empty(len(self._device_memory), dtype=torch.uint8, pin_memory=True)
        host = {name: part.view(shape).numpy() for name, part, shape in self._parts(staged)}
        state, count = self._state, len(rows)
        columns: dict[str, NDArray[Any]] = {
            "rows": rows,
            "positions": state.length[rows] - 1,
            "answer_starts": state.prompt_length[rows],
            "bases": state.base[rows],
            "top_k": state.top_k[rows],
            "top_p": state.top_p[rows],
            "min_p": state.min_p[rows],
            "inv_temperature": state.inv_temperature[rows],
            "greedy": state.greedy[rows],
            "pages": state.pages[rows],
        }
        padding = {"rows": state.num_rows, "inv_temperature": 1, "top_p": 1}
        for name, values in columns.items():
            host[name][:count] = values
            host[name][count:] = padding.get(name, 0)
        self._device_memory.copy_(staged, non_blocking=True)

    def _parts(self, memory: Tensor) -> list[tuple[str, Tensor, tuple[int, ...]]]:
        parts, start = [], 0
        for name, (shape, dtype) in self._fields.items():
            size = prod(shape) * np.dtype(dtype).itemsize
            typed = memory[start : start + size].view(torch.from_numpy(np.empty(0, dtype)).dtype)
            parts.append((name, typed, shape))
            start += _aligned(shape, dtype)
        return parts


def _aligned(shape: tuple[int, ...], dtype: type) -> int:
    return -(-prod(shape) * np.dtype(dtype).itemsize // ALIGN_BYTES) * ALIGN_BYTES

"""Carrying out a step's plan: the model over its tokens, then a token and its log-prob for each row that is ready."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels import KvCache, PagedAttention, sample_and_score
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.native.graphs import DecodeGraphs
from spmd_rl.rollout.native.rows import Rows
from spmd_rl.rollout.native.scheduler import Plan


class Drawn:
    """Tokens and log-probs on their way to the host."""

    def __init__(self, tokens: Tensor, logprobs: Tensor) -> None:
        self._tokens = tokens.to("cpu", non_blocking=True)
        self._logprobs = logprobs.to("cpu", non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Shape: both [M]. Blocks: until the step has run."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tokens.numpy(), self._logprobs.numpy()


class Steps:
    """The device's side of an engine, from the time the cache is there to the time it goes."""

    def __init__(self, model: CausalLM, cache: KvCache, rows: Rows, device: torch.device, *, graphs: bool) -> None:
        self.cache = cache
        self.graphs = DecodeGraphs(model, cache, rows) if graphs else None
        self._model = model
        self._rows = rows
        self._device = device

    @property
    def num_graphs(self) -> int:
        return self.graphs.num_recorded if self.graphs else 0

    def launch(self, plan: Plan, ready: NDArray[np.bool_]) -> Drawn:
        """Compute the tokens of `plan` and draw one for each of its rows that is `ready`.

        Blocks: on a GPU until the step is queued, else until it has run.
        """
        if plan.copies:
            self.cache.copy_pages(*zip(*plan.copies, strict=True))
        if self.graphs is not None and self._rows.has_drawn[plan.rows].all():
            return Drawn(*self.graphs.launch(plan.rows))
        return self._chunks(plan, ready)

    def _chunks(self, plan: Plan, ready: NDArray[np.bool_]) -> Drawn:
        page_size = self.cache.page_size
        ends = np.cumsum(plan.lengths)
        row_of = np.repeat(plan.rows, plan.lengths)
        positions = np.arange(len(row_of)) + np.repeat(plan.starts + plan.lengths - ends, plan.lengths)
        page, offset = np.divmod(positions, page_size)
        attend = PagedAttention.chunks(
            self.cache,
            page_table=self._rows.pages[plan.rows, : int(page.max()) + 1],
            starts=plan.starts,
            lengths=plan.lengths,
            slots=self._rows.pages[row_of, page] * page_size + offset,
            num_heads=self._model.spec.num_heads,
        )
        tokens = self._tensor(self._rows.tokens[row_of, positions].astype(np.int64))
        last = self._tensor(ends[ready] - 1) if ready.any() else None
        out = self._model(tokens, self._tensor(positions), attend, last)
        if last is None:
            return Drawn(torch.empty(0, dtype=torch.int64), torch.empty(0))
        return self._draw(plan.rows[ready], out)

    def _draw(self, rows: NDArray[np.int64], logits: Tensor) -> Drawn:
        state = self._rows

        def unless(off: float, column: NDArray[Any]) -> Tensor | None:
            values = column[rows]
            return self._tensor(values) if (values != off).any() else None

        tokens, logprobs = sample_and_score(
            logits,
            self._tensor(state.inv_temperature[rows]),
            self._tensor(state.base[rows]),
            self._tensor(state.length[rows] - state.prompt_length[rows]),
            greedy=unless(False, state.greedy),
            top_k=unless(0, state.top_k),
            top_p=unless(1, state.top_p),
            min_p=unless(0, state.min_p),
        )
        if self.graphs is not None:
            self.graphs.remember(rows, tokens)
        return Drawn(tokens, logprobs)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

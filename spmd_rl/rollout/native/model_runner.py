"""Carrying out a step's plan: the model over its tokens, then a token and its log-prob for each row
that is ready.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels import KvCache, PagedAttention
from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.native.decode_graphs import DecodeGraphs, Draw
from spmd_rl.rollout.native.prefill_graphs import Chunks, PrefillGraphs
from spmd_rl.rollout.native.sequence_table import SequenceTable
from spmd_rl.rollout.native.step_plan import StepPlan


class Drawn:
    """Tokens and log-probs on their way to the host, from the device or written there by it."""

    def __init__(self, tokens: Tensor, logprobs: Tensor, device: torch.device) -> None:
        self._tokens = tokens.to("cpu", non_blocking=True)
        self._logprobs = logprobs.to("cpu", non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Shape: both [M]. Blocks: until the step has run."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tokens.numpy(), self._logprobs.numpy()


class ModelRunner:
    """The device's side of an engine, from the time the cache is there to the time it goes."""

    def __init__(
        self,
        model: CausalLM,
        cache: KvCache,
        rows: SequenceTable,
        device: torch.device,
        *,
        graphs: bool,
        draw: Draw,
    ) -> None:
        self.cache = cache
        self._decode: DecodeGraphs | None = None
        self._prompts: PrefillGraphs | None = None
        if graphs:
            memory = torch.cuda.graph_pool_handle()
            self._decode = DecodeGraphs(model, cache, rows, memory, draw)
            self._prompts = PrefillGraphs(model, cache, rows.pages.shape[1], memory)
        self._sample = draw
        self._model = model
        self._rows = rows
        self._device = device

    @property
    def num_graphs(self) -> int:
        return (
            self._decode.num_recorded + self._prompts.num_recorded
            if self._decode and self._prompts
            else 0
        )

    def launch(self, plan: StepPlan, ready: NDArray[np.bool_]) -> Drawn:
        """Compute the tokens of `plan` and draw one for each of its rows that is `ready`.

        Blocks: on a GPU until the step is queued, else until it has run.
        """
        if plan.copies:
            self.cache.copy_pages(*zip(*plan.copies, strict=True))
        if self._decode is not None and ready.all() and (plan.lengths == 1).all():
            return Drawn(*self._decode.launch(plan.rows), self._device)
        chunks = self._chunks(plan)
        hidden = self._prompts.hidden(chunks) if self._prompts is not None else None
        if hidden is None:
            hidden = self._hidden(chunks)
        if plan.forks:
            self.cache.copy_pages(*zip(*plan.forks, strict=True))
        if not ready.any():
            return Drawn(torch.empty(0, dtype=torch.int64), torch.empty(0), self._device)
        # of a fork, that of the row before it
        last = self._tensor(np.cumsum(plan.lengths)[ready] - 1)
        return self._draw(plan.rows[ready], self._model.logits(hidden.index_select(0, last)))

    def _chunks(self, plan: StepPlan) -> Chunks:
        row_of = np.repeat(plan.rows, plan.lengths)
        positions = np.arange(len(row_of)) + np.repeat(
            plan.starts + plan.lengths - np.cumsum(plan.lengths), plan.lengths
        )
        page, offset = np.divmod(positions, self.cache.page_size)
        pages, busy = self._rows.pages, plan.lengths > 0
        return Chunks(
            tokens=self._rows.tokens[row_of, positions].astype(np.int64),
            positions=positions,
            slots=pages[row_of, page] * self.cache.page_size + offset,
            starts=plan.starts[busy],
            lengths=plan.lengths[busy],
            pages=pages[plan.rows[busy], : int(page.max()) + 1],
        )

    def _hidden(self, chunks: Chunks) -> Tensor:
        attend = PagedAttention.chunks(
            self.cache,
            page_table=chunks.pages,
            starts=chunks.starts,
            lengths=chunks.lengths,
            slots=chunks.slots,
            num_heads=self._model.spec.num_heads,
        )
        return self._model(self._tensor(chunks.tokens), self._tensor(chunks.positions), attend)

    def _draw(self, rows: NDArray[np.int64], logits: Tensor) -> Drawn:
        state = self._rows
        greedy = state.greedy[rows]
        tokens, logprobs = self._sample(
            logits,
            self._tensor(state.inv_temperature[rows]),
            self._tensor(state.bases(rows)),
            self._tensor(state.length[rows] - state.prompt_length[rows]),
            greedy=self._tensor(greedy) if greedy.any() else None,
            **{name: self._tensor(getattr(state, name)[rows]) for name in state.filters(rows)},
        )
        if self._decode is not None:
            self._decode.remember(rows, tokens)
        return Drawn(tokens, logprobs, self._device)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return upload(array, self._device)

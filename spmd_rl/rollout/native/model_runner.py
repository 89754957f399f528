"""Model runner: it computes the tokens of a step's plan and samples the next token of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels import KvCache, PagedAttention
from spmd_rl.kernels.moe.route_hash import ROUTES, hashed_routes
from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.kernels.vocab.kept_sets import encoded_rows
from spmd_rl.kernels.vocab.kept_words import KeptRows
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.native.decode_graphs import DecodeGraphs, Sampler
from spmd_rl.rollout.native.prefill_graphs import PrefillChunks, PrefillGraphs
from spmd_rl.rollout.native.sampled_tokens import NO_COLUMNS, SampledOnDevice, SampledTokens
from spmd_rl.rollout.native.sequence_table import SequenceTable
from spmd_rl.rollout.native.step_plan import StepPlan


class ModelRunner:
    """Runs steps on the device over one cache, eagerly or with recorded graphs."""

    def __init__(
        self,
        model: CausalLM,
        cache: KvCache,
        table: SequenceTable,
        device: torch.device,
        *,
        graphs: bool,
        sampler: Sampler,
    ) -> None:
        self.cache = cache
        self._decode_graphs: DecodeGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        if graphs:
            memory = torch.cuda.graph_pool_handle()
            self._decode_graphs = DecodeGraphs(model, cache, table, memory, sampler)
            self._prefill_graphs = PrefillGraphs(model, cache, table.pages.shape[1], memory)
        self._sampler = sampler
        self._model = model
        self._table = table
        self._device = device

    @property
    def num_graphs(self) -> int:
        if self._decode_graphs is None or self._prefill_graphs is None:
            return 0
        return self._decode_graphs.num_recorded + self._prefill_graphs.num_recorded

    def launch(self, plan: StepPlan, samples: NDArray[np.bool_]) -> SampledTokens:
        """Compute the tokens of `plan`, and sample one for each of its rows where `samples` is set.

        Blocks: on a GPU until the step is queued, else until it has run.
        """
        if plan.copies_before:
            self.cache.copy_pages(*zip(*plan.copies_before, strict=True))
        if self._decode_graphs is not None and samples.all() and (plan.lengths == 1).all():
            return SampledTokens(self._decode_graphs.launch(plan.rows), self._device)
        chunks = self._chunks(plan)
        replayed = None
        if self._prefill_graphs is not None:
            replayed = self._prefill_graphs.hidden_states(chunks)
        if replayed is not None:
            hidden, hashed = replayed
        else:
            with hashed_routes() as hashed:
                hidden = self._hidden_states(chunks)
        if plan.copies_after:
            self.cache.copy_pages(*zip(*plan.copies_after, strict=True))
        if not samples.any():
            nothing = SampledOnDevice(torch.empty(0, dtype=torch.int64), torch.empty(0))
            return SampledTokens(nothing, self._device)
        # A fork adds no token, so its last token is that of the row before it.
        last_tokens = self._tensor(np.cumsum(plan.lengths)[samples] - 1)
        logits = self._model.logits(hidden.index_select(0, last_tokens))
        return self._sample(plan.rows[samples], logits, hashed.of_rows(last_tokens))

    def _chunks(self, plan: StepPlan) -> PrefillChunks:
        token_rows = np.repeat(plan.rows, plan.lengths)
        first_positions = plan.starts + plan.lengths - np.cumsum(plan.lengths)
        positions = np.arange(len(token_rows)) + np.repeat(first_positions, plan.lengths)
        page, offset = np.divmod(positions, self.cache.page_size)
        pages, busy = self._table.pages, plan.lengths > 0
        return PrefillChunks(
            tokens=self._table.tokens[token_rows, positions].astype(np.int64),
            positions=positions,
            slots=pages[token_rows, page] * self.cache.page_size + offset,
            starts=plan.starts[busy],
            lengths=plan.lengths[busy],
            pages=pages[plan.rows[busy], : int(page.max()) + 1],
        )

    def _hidden_states(self, chunks: PrefillChunks) -> Tensor:
        attend = PagedAttention.chunks(
            self.cache,
            page_table=chunks.pages,
            starts=chunks.starts,
            lengths=chunks.lengths,
            slots=chunks.slots,
        )
        return self._model(self._tensor(chunks.tokens), self._tensor(chunks.positions), attend)

    def _sample(
        self, rows: NDArray[np.int64], logits: Tensor, routes: Tensor | None
    ) -> SampledTokens:
        table = self._table
        greedy = table.greedy[rows]
        filters, kept = table.active_filters(rows), None
        if filters and table.replays[rows].any():
            kept = KeptRows.empty(self._tensor(table.replays[rows]), logits.shape[1])
        tokens, logprobs = self._sampler(
            logits,
            self._tensor(table.inv_temperature[rows]),
            self._tensor(table.random_bases(rows)),
            self._tensor(table.length[rows] - table.prompt_length[rows]),
            greedy=self._tensor(greedy) if greedy.any() else None,
            **{name: self._tensor(getattr(table, name)[rows]) for name in filters},
            kept=kept,
        )
        if self._decode_graphs is not None:
            self._decode_graphs.set_newest_tokens(rows, tokens)
        encoded = None if kept is None else encoded_rows(kept, logits.shape[1])
        columns = NO_COLUMNS if routes is None else {ROUTES: routes}
        return SampledTokens(SampledOnDevice(tokens, logprobs, encoded, columns), self._device)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return upload(array, self._device)

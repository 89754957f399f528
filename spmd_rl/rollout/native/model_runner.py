"""Model runner: it computes the tokens of a step's plan and samples the next token of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels import KvCache, PagedAttention
from spmd_rl.kernels.moe.route_hash import ROUTES
from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.kernels.vocab.kept_sets import encoded_rows
from spmd_rl.kernels.vocab.kept_words import KeptRows
from spmd_rl.model.layers.moe_module import mixtures, shares_experts
from spmd_rl.model.layers.route_shape import RouteShape
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.native.decode_graphs import DecodeGraphs
from spmd_rl.rollout.native.joint.joint_steps import ExpertRanks, JointSteps
from spmd_rl.rollout.native.prefill_graphs import PassedTokens, PrefillChunks, PrefillGraphs
from spmd_rl.rollout.native.recorded_routes import RecordedRoutes, RoutedStep
from spmd_rl.rollout.native.sampled_tokens import NO_COLUMNS, SampledOnDevice, SampledTokens
from spmd_rl.rollout.native.sequence_table import SequenceTable
from spmd_rl.rollout.native.step_plan import StepPlan
from spmd_rl.rollout.native.tp.head_draw import HeadDraw, Sampler

NO_ROWS: NDArray[np.int64] = np.zeros(0, np.int64)


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
        experts: ExpertRanks | None = None,
    ) -> None:
        """The ranks of `experts` share those of the model."""
        self.cache = cache
        self._joint: JointSteps | None = None
        if graphs and experts is not None:
            self._joint = JointSteps(model, experts.group, table.num_rows)
        self._decode_graphs: DecodeGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        self._draw = draw = HeadDraw(model, sampler)
        if graphs:
            memory = torch.cuda.graph_pool_handle()
            self._decode_graphs = DecodeGraphs(model, cache, table, memory, draw, self._joint)
            fits = cache.backend.fits_prefill_graphs and not model.spec.has_states
            if self._joint is None and fits:
                self._prefill_graphs = PrefillGraphs(model, cache, table.pages.shape[1], memory)
        self._routes: RecordedRoutes | None = None  # once a request asks for them
        self._model = model
        self._table = table
        self._device = device
        self._shared = mixtures(model) if shares_experts(model) else []

    def record_if_asked(self, sampling: SamplingConfig) -> None:
        """Record the routes of every step from the first request on that asks for them.

        Raises: ConfigError without mixtures.
        """
        if sampling.replay_routes and self._routes is None:
            shape = RouteShape.required(self._model.spec)
            self._routes = RecordedRoutes(shape, self.cache.num_pages, self.cache.page_size)

    def note_prompts(self, rows: NDArray[np.int64]) -> None:
        """Note the routes of the prompts of rows whose first token is to be written."""
        if self._routes is not None:
            self._routes.note_prompts(self._table, rows)

    @property
    def num_graphs(self) -> int:
        graphs = self._decode_graphs, self._prefill_graphs
        return sum(one.num_recorded for one in graphs if one is not None)

    def take_part(self) -> None:
        """Compute what this rank's experts give the rows of others, in a step without its own."""
        if self._joint is None:
            self._pass_no_rows()
            return
        with self._beside_others(self._joint, has_prompts=False, num_rows=0):
            pass

    def launch(self, plan: StepPlan, samples: NDArray[np.bool_]) -> SampledTokens:
        """Compute the tokens of `plan`, and sample one for each of its rows where `samples` is set.

        Blocks: on a GPU until the step is queued, else until it has run.
        """
        if plan.copies_before:
            self.cache.copy_pages(*zip(*plan.copies_before, strict=True))
        if plan.states_before:
            self.cache.copy_states(*zip(*plan.states_before, strict=True))
        graphs = self._decode_graphs
        decodes = graphs is not None and samples.all() and (plan.lengths == 1).all()
        if self._joint is None:
            return self._decode(plan) if decodes else self._compute(plan, samples)
        num_rows = len(plan.rows) if decodes else 0
        with self._beside_others(self._joint, has_prompts=not decodes, num_rows=num_rows) as room:
            return self._decode(plan, room) if decodes else self._compute(plan, samples)

    @contextmanager
    def _beside_others(
        self, joint: JointSteps, *, has_prompts: bool, num_rows: int
    ) -> Iterator[int]:
        """Do around this rank's part of a step what the parts of other ranks ask of it.

        Gives the number of rows for which its decoding step must have room.
        """
        step = joint.agree(has_prompts=has_prompts, num_rows=num_rows)
        if step.has_prompts and not has_prompts:
            self._pass_no_rows()
        yield step.num_rows
        if step.num_rows and not num_rows:
            assert self._decode_graphs is not None
            self._decode_graphs.launch(NO_ROWS, room=step.num_rows)

    def _pass_no_rows(self) -> None:
        """Take part in a pass of other ranks' rows that is not recorded."""
        for mixture in self._shared:
            mixture.take_part()

    def _compute(self, plan: StepPlan, samples: NDArray[np.bool_]) -> SampledTokens:
        """Compute a step that is no decoding step alone, or that is not recorded."""
        chunks = self._chunks(plan)
        passed = None
        if self._prefill_graphs is not None:
            passed = self._prefill_graphs.hidden_states(chunks, self._route_dtype)
        if passed is None:
            passed = self._passed(chunks)
        if plan.copies_after:
            self.cache.copy_pages(*zip(*plan.copies_after, strict=True))
        if plan.states_after:
            self.cache.copy_states(*zip(*plan.states_after, strict=True))
        # A fork adds no token, so its last token is that of the row before it.
        last_tokens = np.cumsum(plan.lengths)[samples] - 1
        routed = self._routed(plan, passed.routes, chunks.slots, last_tokens)
        if not samples.any():
            nothing = SampledOnDevice(torch.empty(0, dtype=torch.int64), torch.empty(0))
            return SampledTokens(nothing, self._device, routed)
        last = self._tensor(last_tokens)
        hidden = passed.hidden.index_select(0, last)
        sampled = self._sample(plan.rows[samples], hidden, passed.hashed.of_rows(last))
        return SampledTokens(sampled, self._device, routed)

    @property
    def _route_dtype(self) -> torch.dtype | None:
        """The dtype of recorded routes, None where none are recorded."""
        return None if self._routes is None else self._routes.dtype

    def _decode(self, plan: StepPlan, room: int = 0) -> SampledTokens:
        """Replay a decoding step, of a graph with room for so many rows."""
        assert self._decode_graphs is not None
        sampled = self._decode_graphs.launch(plan.rows, self._route_dtype, room)
        page, offset = np.divmod(plan.starts, self.cache.page_size)
        slots = self._table.pages[plan.rows, page] * self.cache.page_size + offset
        routed = self._routed(plan, sampled.routes, slots, np.arange(len(plan.rows)))
        return SampledTokens(sampled, self._device, routed)

    def _routed(
        self,
        plan: StepPlan,
        routes: Tensor | None,
        slots: NDArray[np.int64],
        sampled: NDArray[np.int64],
    ) -> RoutedStep | None:
        if self._routes is None or routes is None:
            return None
        return RoutedStep(self._routes, plan, routes, slots, sampled)

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
            rows=plan.rows[busy],
        )

    def _passed(self, chunks: PrefillChunks) -> PassedTokens:
        """Compute the tokens without a graph."""
        attend = PagedAttention.chunks(
            self.cache,
            page_table=chunks.pages,
            starts=chunks.starts,
            lengths=chunks.lengths,
            slots=chunks.slots,
            states=chunks.rows,
        )
        inputs = self._tensor(chunks.tokens), self._tensor(chunks.positions), attend
        return PassedTokens.of(lambda: self._model(*inputs), self._route_dtype)

    def _sample(
        self, rows: NDArray[np.int64], hidden: Tensor, routes: Tensor | None
    ) -> SampledOnDevice:
        table, vocab = self._table, self._model.spec.vocab_size
        greedy = table.greedy[rows]
        filters, kept = table.active_filters(rows), None
        if filters and table.replays[rows].any():
            kept = KeptRows.empty(self._tensor(table.replays[rows]), vocab)
        tokens, logprobs = self._draw(
            hidden,
            self._tensor(table.inv_temperature[rows]),
            self._tensor(table.random_bases(rows)),
            self._tensor(table.length[rows] - table.prompt_length[rows]),
            greedy=self._tensor(greedy) if greedy.any() else None,
            **{name: self._tensor(getattr(table, name)[rows]) for name in filters},
            kept=kept,
        )
        if self._decode_graphs is not None:
            self._decode_graphs.set_newest_tokens(rows, tokens)
        encoded = None if kept is None else encoded_rows(kept, vocab)
        columns = NO_COLUMNS if routes is None else {ROUTES: routes}
        return SampledOnDevice(tokens, logprobs, encoded, columns)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return upload(array, self._device)

"""The native engine: each step is scheduled, run over paged KV, and its new tokens collected."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.errors import ResidencyError, SpmdError
from spmd_rl.kernels import KvCache, sample_and_score
from spmd_rl.kernels.attention.coded_backend import with_codes
from spmd_rl.kernels.low_precision.block_codes import BlockCodes
from spmd_rl.model.attention import backend_of, fits_cuda_graphs
from spmd_rl.model.formats.coded_cache import kv_exponents
from spmd_rl.model.formats.coded_tensors import coded_weights
from spmd_rl.model.formats.coded_weights import weights_fact
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.local_weights import local_weights
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.residency import Receipt
from spmd_rl.offload.role_memory import RoleMemory
from spmd_rl.rollout.engine import Request, StepOutput
from spmd_rl.rollout.kv_pages import num_state_slots
from spmd_rl.rollout.native.auto_sizes import EngineSizes, agree, choose_sizes
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine_memory import EngineMemory
from spmd_rl.rollout.native.joint.joint_steps import ExpertRanks, can_record
from spmd_rl.rollout.native.model_runner import ModelRunner
from spmd_rl.rollout.native.pages import PagePool, state_snapshots
from spmd_rl.rollout.native.prefill_cost import PrefillCost
from spmd_rl.rollout.native.request_validator import RequestValidator
from spmd_rl.rollout.native.sampled_tokens import SampledTokens
from spmd_rl.rollout.native.scheduler import Scheduler
from spmd_rl.rollout.native.sequence_table import SequenceTable
from spmd_rl.rollout.native.step_budget import PrefillBound
from spmd_rl.rollout.native.step_plan import StepPlan
from spmd_rl.rollout.native.stop_checker import StopChecker
from spmd_rl.rollout.native.tp.head_draw import Sampler
from spmd_rl.types.prompts import prompt_name
from spmd_rl.types.samples import Sample, SampleStatus
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.proof.digest import base_fact, digest
from spmd_rl.weights.tensor_ends import TensorSink

NO_WEIGHTS = (
    "the engine has no weights of a known version: push one to it, or give it a model folder that "
    "has some. Where it shares its trainer's memory, push after every train step, or link them "
    "with alias=False. Where its weights slept after a push, push again"
)


@dataclass(frozen=True)
class InFlightStep:
    """A step that was launched: `sampled` belongs to `rows`, if they still hold these sequences."""

    rows: NDArray[np.int64]
    sequence_ids: NDArray[np.int64]
    version: int
    sampled: SampledTokens


class NativeEngine:
    """Implements `rollout.engine.Engine`.

    `decode` turns tokens into text, which only stop strings need. `sampler` draws tokens from
    logits. The ranks of `experts` share those of the model. If decoding is recorded in graphs,
    scheduling is asynchronous: a step is launched before the host has the tokens of the last one.
    Then `step` returns one step late, and a sequence that ends by a token computes one more, which
    is dropped.
    """

    def __init__(
        self,
        model: CausalLM,
        cfg: NativeEngineConfig,
        device: torch.device,
        *,
        decode: Callable[[tuple[int, ...]], str] | None = None,
        sampler: Sampler = sample_and_score,
        reserved_bytes: int = 0,
        memory: RoleMemory | None = None,
        experts: ExpertRanks | None = None,
    ) -> None:
        assert model.exponents == kv_exponents(cfg), "model and cache have one format"
        self.model, self.cfg = model, cfg
        self._memory = EngineMemory(memory or RoleMemory(None, device))
        self.spec = spec = model.spec
        sizes = choose_sizes(cfg, model.own_spec, device, reserved_bytes)
        self.sizes = sizes = agree(sizes, model.part.exchange, device)
        self.device = device
        self.version: int | None = None
        self.is_pushing = False
        is_recorded = cfg.cuda_graphs and can_record(model, experts)
        self._async_scheduling = is_recorded and _fits_graphs(model, sizes, device)
        if self._async_scheduling:
            model.pack_projections()
        self.table = SequenceTable(cfg.max_batch, spec.max_positions, sizes.page_size)
        self.scheduler = Scheduler(
            self.table,
            PagePool(sizes.num_pages),
            max_step_tokens=sizes.max_step_tokens,
            prefix_cache=cfg.prefix_cache,
            eos_ids=spec.eos_ids,
            separate_prefill=self._async_scheduling,
            prefill_bound=self._prefill_bound(),
            snapshots=state_snapshots(spec, cfg.max_batch),
        )
        self._sampler = sampler
        self._stop_checker = StopChecker(self.table, decode)
        self._validator = RequestValidator(spec, max_kv_tokens=sizes.num_kv_tokens)
        self._num_steps = self._num_generated = 0
        self._in_flight: InFlightStep | None = None
        self._base_fact: dict[str, str | int] = {}  # of weights that are never pushed
        self._runner = self._new_runner(experts)

    @property
    def has_work(self) -> bool:
        return self._stop_checker.num_requests > 0

    @property
    def load(self) -> tuple[int, int]:
        return self.scheduler.load

    def check(self, request: Request) -> None:
        """Raise what `submit` raises for a request that can never fit."""
        self._validator.check(request)

    def submit(self, request: Request) -> None:
        self.check(request)
        self._runner.record_if_asked(request.sampling)
        self._stop_checker.add(request)
        self.scheduler.add(request)

    @torch.inference_mode()
    def step(self) -> StepOutput:
        runner, version = self._check_ready()
        try:
            launched = self._schedule_and_launch(runner, version)
            started = self.scheduler.take_admitted()
            if self._async_scheduling:
                launched, self._in_flight = self._in_flight, launched
            output = self._collect(launched, *started)
        except BaseException:
            self._reset()
            raise
        if not self.has_work and self._in_flight is not None:
            self._in_flight.sampled.drop()  # it sampled for sequences that have ended meanwhile
            self._in_flight = None
        return output

    def abort(self, uid: int | None = None, index: int | None = None) -> list[Sample]:
        return [self._end(request, "aborted") for request in self.scheduler.abort(uid, index)]

    def snapshot(self) -> list[Sample]:
        return [request.sample("aborted") for request in self.scheduler.requests()]

    def sleep(self, tags: tuple[str, ...] = ()) -> list[Receipt]:
        self.scheduler.discard_kv(self.version or 0)
        self._in_flight = None
        receipts = self._memory.sleep(tags)
        if self._memory.lost_weights:
            self.version = None
        return receipts

    def wake(self, tags: tuple[str, ...] = ()) -> list[Receipt]:
        return self._memory.wake(tags)

    def sink(self) -> TensorSink:
        return TensorSink(
            local_weights(self.model, pushed=True).items(),
            self._begin_push,
            self._use_version,
            self._forget_version,
        )

    def contract(self) -> dict[str, str | int]:
        facts = self.model.contract(self.device, self.sizes.dtype, self.cfg.attention_split)
        if self.model.lora.rank and not self._base_fact:
            weights = local_weights(self.model, pushed=False)
            base = {name: one.local for name, one in weights.items()}
            codes = coded_weights(base, self.model.spec, self.cfg.weights)
            self._base_fact = base_fact(_base_digests(base, codes, self.sizes.dtype))
        return facts | self._base_fact | weights_fact(self.cfg.weights)

    def stats(self) -> dict[str, int]:
        return {
            "num_steps": self._num_steps,
            "num_generated_tokens": self._num_generated,
            "num_pages": self.sizes.num_pages,
            "num_graphs": self._runner.num_graphs,
            "kv_bytes": self._runner.cache.num_bytes if self._memory.has_pages else 0,
            **self._runner.cache.code_counts(),
            **self.scheduler.stats(),
        }

    def _prefill_bound(self) -> PrefillBound | None:
        own = self.model.own_spec
        return prefill_bound(own, self.device, self.cfg) if self._async_scheduling else None

    def _begin_push(self) -> None:
        self._memory.begin_push(changes_slab=not self.model.lora.rank)
        self.version, self.is_pushing = None, True

    def _forget_version(self) -> None:
        self.version = None

    def _use_version(self, version: int) -> None:
        """Forget all K/V, because the weights are now `version`."""
        self.version, self.is_pushing = version, False
        if self._async_scheduling:
            self.model.fuse_projections()
        self.scheduler.discard_kv(version)

    def _new_runner(self, experts: ExpertRanks | None) -> ModelRunner:
        cache = KvCache(
            [block.cache() for block in self.model.own_spec.blocks],
            num_pages=self.sizes.num_pages,
            page_size=self.sizes.page_size,
            dtype=self.sizes.dtype,
            device=self.device,
            allocate=self._memory.allocate_pages,
            split=self.cfg.attention_split,
            exponents=self.model.exponents,
            num_states=num_state_slots(self.cfg.max_batch),
        )
        return ModelRunner(
            self.model,
            cache,
            self.table,
            self.device,
            graphs=self._async_scheduling,
            sampler=self._sampler,
            experts=experts,
        )

    def _reset(self) -> None:
        """Clear all K/V after a step that failed.

        Pages that it published may be unwritten, or hold NaN that outlives their tokens.
        """
        self.scheduler.discard_kv(self.version or 0)
        self._in_flight = None
        self._memory.clear_pages()

    def _check_ready(self) -> tuple[ModelRunner, int]:
        if not self._memory.is_awake:
            raise ResidencyError("the engine is asleep: wake it before it generates")
        if self.version is None:
            raise SpmdError(NO_WEIGHTS)
        return self._runner, self.version

    def _schedule_and_launch(self, runner: ModelRunner, version: int) -> InFlightStep | None:
        """Queue the next step, if there is work for one; else take part in that of other ranks."""
        plan = self.scheduler.schedule()
        if not len(plan.rows):
            runner.take_part()
            return None
        return self._launch(plan, self.scheduler.rows_to_sample(plan), runner, version)

    def _launch(
        self, plan: StepPlan, samples: NDArray[np.bool_], runner: ModelRunner, version: int
    ) -> InFlightStep:
        sampled = runner.launch(plan, samples)
        self.scheduler.mark_computed(plan)
        rows = plan.rows[samples]
        self.table.add_pending(rows)
        self._num_steps += 1
        return InFlightStep(rows, self.table.sequence_id[rows], version, sampled)

    def _collect(
        self, step: InFlightStep | None, started: list[tuple[int, int]], cached: list[int]
    ) -> StepOutput:
        """Write what `step` sampled to the table, for rows that still hold the same sequences."""
        if step is None:
            nothing = np.zeros(0, np.int64)
            no_logprobs = np.zeros(0, np.float32)
            return StepOutput(nothing, nothing, nothing, no_logprobs, [], started, cached)
        rows, sampled = step.rows, step.sampled.wait()
        is_same = self.table.sequence_id[rows] == step.sequence_ids
        if not is_same.all():
            rows, sampled = rows[is_same], sampled.select(is_same)
        tokens, logprobs = sampled.tokens, sampled.logprobs
        check_logprobs(self.table, rows, logprobs, step.version)
        self._runner.note_prompts(rows)
        self.table.write_sampled(
            rows, tokens, logprobs, step.version, sampled.kept, sampled.columns
        )
        self._num_generated += len(rows)
        uids, indices = self.table.uid[rows], self.table.index[rows]
        finished = self._finish(rows, tokens)
        return StepOutput(uids, indices, tokens, logprobs, finished, started, cached)

    def _finish(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> list[Sample]:
        """Remove the rows whose newest token was their last, and return their samples."""
        stopped = self._stop_checker.stopped(rows, tokens)
        ended = stopped | (self.table.host_length(rows) == self.table.max_length[rows])
        if not ended.any():
            return []
        requests = self.scheduler.remove(rows[ended].tolist())
        return [
            self._end(request, "completed" if by_token else "truncated")
            for request, by_token in zip(requests, stopped[ended].tolist(), strict=True)
        ]

    def _end(self, request: Request, status: SampleStatus) -> Sample:
        self._stop_checker.remove(request)
        return request.sample(status)


def _fits_graphs(model: CausalLM, sizes: EngineSizes, device: torch.device) -> bool:
    """Return whether this rank's kernels can be recorded, and its exchange with other ranks."""
    backend = with_codes(backend_of(model.spec, sizes.dtype, device), model.exponents, device)
    exchange = model.part.exchange
    fits = fits_cuda_graphs(model.spec, backend, sizes.page_size)
    return fits and (exchange is None or exchange.is_recordable)


def prefill_bound(spec: ModelSpec, device: torch.device, cfg: NativeEngineConfig) -> PrefillBound:
    """Return the bound of the work on prompts on a GPU, of the layers that are on this rank."""
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    cost = PrefillCost.of_model(spec, num_processors)
    return PrefillBound(cost, cfg.max_prefill_ms / 1e3 or math.inf)


def check_logprobs(
    table: SequenceTable, rows: NDArray[np.int64], logprobs: NDArray[np.float32], version: int
) -> None:
    """Raise an SpmdError for the first of some rows whose new token has no log-prob."""
    nan_rows = rows[np.isnan(logprobs)]
    if len(nan_rows):
        row = nan_rows[0]
        position = table.host_length(nan_rows)[0] - table.prompt_length[row]
        name = prompt_name(table.uid[row])
        where = f"{name}, sample {table.index[row]}, response token {position}"
        raise SpmdError(f"weights version {version} give NaN logits: {where}")


def _base_digests(
    base: dict[str, Tensor], codes: dict[str, BlockCodes], dtype: torch.dtype
) -> dict[str, int]:
    """Return the digests of a base in `dtype`; where it is codes, of what they stand for."""
    found = digest(LocalTensors.whole(base))
    for name, one in codes.items():  # one at a time, as they are larger
        found |= digest(LocalTensors.whole({name: one.decoded(dtype)}))
    return found

"""The native engine: a step schedules, runs the model over paged KV, and draws a token for each row
that is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.errors import ConfigError, ResidencyError, SpmdError
from spmd_rl.kernels import KvCache, sample_and_score
from spmd_rl.kernels.attention.backend import attention_backend
from spmd_rl.model.network import CausalLM
from spmd_rl.offload.elastic import ElasticMemory
from spmd_rl.offload.host import HostMemory
from spmd_rl.rollout.engine import EngineConfig, Request, RequestOutput
from spmd_rl.rollout.native.admission import Admission
from spmd_rl.rollout.native.auto_sizes import settle
from spmd_rl.rollout.native.decode_graphs import Draw
from spmd_rl.rollout.native.model_runner import Drawn, ModelRunner
from spmd_rl.rollout.native.pages import PagePool
from spmd_rl.rollout.native.scheduler import Scheduler
from spmd_rl.rollout.native.sequence_table import SequenceTable
from spmd_rl.rollout.native.stop import StopStrings
from spmd_rl.types.samples import FinishReason, Sample
from spmd_rl.weights.local_tensors import LocalTensors

NO_WEIGHTS = (
    "the engine has no weights of a known version: push one to it, or give it a model folder that has some (if it "
    "shares its trainer's memory, push after every train step, or link them with alias=False)"
)


@dataclass(frozen=True)
class _Launched:
    """A step under way: `drawn` goes to `rows`, if they still hold the sequences of `tickets`."""

    rows: NDArray[np.int64]
    tickets: NDArray[np.int64]
    version: int
    drawn: Drawn


class NativeEngine:
    """See `rollout.engine.Engine`. `decode` turns tokens into text; only stop strings need it.
    `draw` chooses tokens.

    Where decoding is recorded in graphs, a step is launched before the tokens of the last one are
    looked at: `step` returns one step late, and a sequence that ends by a token computes one more,
    which is dropped.
    """

    def __init__(
        self,
        model: CausalLM,
        cfg: EngineConfig,
        device: torch.device,
        *,
        decode: Callable[[tuple[int, ...]], str] | None = None,
        draw: Draw = sample_and_score,
    ) -> None:
        self.model = model
        self.spec = spec = model.spec
        self.cfg = cfg = settle(cfg, spec, device)
        self.device = device
        self.version: int | None = None
        backend = attention_backend(spec.head_dim, getattr(torch, cfg.dtype), device)
        self._ahead = cfg.cuda_graphs and backend.fits_cuda_graphs
        self.rows = SequenceTable(cfg.max_batch, spec.max_positions, cfg.page_size)
        self.scheduler = Scheduler(
            self.rows,
            PagePool(cfg.num_pages),
            max_step_tokens=cfg.max_step_tokens,
            prefix_cache=cfg.prefix_cache,
            eos_ids=spec.eos_ids,
            apart=self._ahead,
        )
        if self._ahead:
            model.pack_projections()
        self._draw = draw
        self._decode = lru_cache(maxsize=1 << 16)(decode) if decode else None
        self._live: dict[tuple[int, int], StopStrings | None] = {}
        self._admission = Admission(spec, room=cfg.num_pages * cfg.page_size)
        self._num_steps = 0
        self._num_generated = 0
        self._steps: ModelRunner | None = None
        self._memory: ElasticMemory | HostMemory | None = None
        self._in_flight: _Launched | None = None
        self.wake()

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def submit(self, request: Request) -> None:
        self._admission.check(request)
        if (request.uid, request.index) in self._live:
            raise SpmdError(
                f"prompt {request.uid}, sample {request.index} is in the engine already"
            )
        self._live[request.uid, request.index] = self._stop_strings(request)
        self.scheduler.add(request)

    @torch.inference_mode()
    def step(self) -> RequestOutput:
        steps, version = self._ready()
        try:
            launched = self._launch(steps, version)
            if self._ahead:
                launched, self._in_flight = self._in_flight, launched
            progress = self._collect(launched)
        except BaseException:
            self._start_afresh()
            raise
        if not self._live:
            self._in_flight = None  # drew for sequences that turned out to have ended
        return progress

    def abort(self, uid: int | None = None, index: int | None = None) -> list[Sample]:
        return [self._end(request, "abort") for request in self.scheduler.abort(uid, index)]

    def new_version(self, version: int) -> None:
        self.version = version
        if self._ahead:
            self.model.fuse_projections()
        self.scheduler.forget(version)

    def outdate(self) -> None:
        self.version = None

    def sleep(self) -> None:
        self.scheduler.forget(self.version or 0)
        self._in_flight = None
        if self._memory is not None:
            self._memory.unmap()

    def wake(self) -> None:
        try:
            self._take_memory()
        except ResidencyError as error:
            advice = "a lower engine.num_pages or engine.memory_fraction asks for less"
            raise ResidencyError(
                f"no room for pages of keys and values: {error}; {advice}"
            ) from error

    def _take_memory(self) -> None:
        if self._steps is None:
            cache = self._new_cache()
            self._steps = ModelRunner(
                self.model, cache, self.rows, self.device, graphs=self._ahead, draw=self._draw
            )
        elif self._memory is not None and not self._memory.is_mapped:
            self._memory.map()
            if self._memory.bytes.is_cuda:
                self._memory.bytes.zero_()

    def _start_afresh(self) -> None:
        """After a step that failed: pages that it promised may be unwritten, or hold NaN that
        outlives their tokens.
        """
        self.sleep()
        if isinstance(self._memory, HostMemory):
            self._steps = self._memory = None
        self.wake()

    @property
    def _is_awake(self) -> bool:
        return self._memory is not None and self._memory.is_mapped

    def _new_cache(self) -> KvCache:
        spec = self.spec
        return KvCache(
            num_layers=spec.num_layers,
            num_pages=self.cfg.num_pages,
            page_size=self.cfg.page_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=getattr(torch, self.cfg.dtype),
            device=self.device,
            allocate=self._elastic,
            split=self.cfg.attention_split,
        )

    def _elastic(self, num_bytes: int) -> Tensor:
        """Memory that keeps its address while the engine sleeps, for the graphs recorded over it."""
        if self.device.type == "cpu":
            self._memory = HostMemory(num_bytes)
            return self._memory.bytes
        self._memory = ElasticMemory(num_bytes, self.device)
        return self._memory.bytes.zero_()

    def weights(self) -> LocalTensors:
        return LocalTensors.whole(dict(self.model.named_parameters()))

    def contract(self) -> dict[str, str | int]:
        return self.model.contract(
            self.device, getattr(torch, self.cfg.dtype), self.cfg.attention_split
        )

    def stats(self) -> dict[str, int]:
        return {
            "num_steps": self._num_steps,
            "num_generated_tokens": self._num_generated,
            "num_running": len(self.scheduler.running),
            "num_waiting": len(self.scheduler.waiting),
            "num_pages": self.cfg.num_pages,
            "num_evictions": self.scheduler.pool.num_evictions,
            "num_graphs": self._steps.num_graphs if self._steps else 0,
            "kv_bytes": self._steps.cache.num_bytes if self._steps and self._is_awake else 0,
            **asdict(self.scheduler.counters),
        }

    def _ready(self) -> tuple[ModelRunner, int]:
        if self._steps is None or not self._is_awake:
            raise ResidencyError("the engine is asleep: wake it before it generates")
        if self.version is None:
            raise SpmdError(NO_WEIGHTS)
        return self._steps, self.version

    def _stop_strings(self, request: Request) -> StopStrings | None:
        if not request.sampling.stop:
            return None
        if self._decode is None:
            raise ConfigError("stop strings need a tokenizer, and this engine was given none")
        stop = StopStrings(request.sampling.stop, self._decode)
        for token in request.tokens.tolist():
            stop.push(token)
        return stop

    def _launch(self, steps: ModelRunner, version: int) -> _Launched | None:
        """Queue the next step, if there is work for one."""
        plan = self.scheduler.schedule()
        if not len(plan.rows):
            return None
        ready = self.scheduler.ready(plan)
        drawn = steps.launch(plan, ready)
        self.scheduler.computed(plan)
        rows = plan.rows[ready]
        self.rows.promise(rows)
        self._num_steps += 1
        return _Launched(rows, self.rows.ticket[rows], version, drawn)

    def _collect(self, launched: _Launched | None) -> RequestOutput:
        """Take in what a step drew, for those of its rows that still hold the sequence it drew for."""
        if launched is None:
            nothing = np.zeros(0, np.int64)
            return RequestOutput(nothing, nothing, nothing, np.zeros(0, np.float32), finished=[])
        tokens, logprobs = launched.drawn.arrays()
        stayed = self.rows.ticket[launched.rows] == launched.tickets
        rows, tokens, logprobs = launched.rows[stayed], tokens[stayed], logprobs[stayed]
        self._check_logprobs(rows, logprobs)
        self.rows.fulfil(rows, tokens, logprobs, launched.version)
        self._num_generated += len(rows)
        uids, indices = self.rows.uid[rows], self.rows.index[rows]
        return RequestOutput(uids, indices, tokens, logprobs, finished=self._finish(rows, tokens))

    def _check_logprobs(self, rows: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        broken = rows[np.isnan(logprobs)]
        if len(broken):
            row, state = broken[0], self.rows
            position = state.known(broken)[0] - state.prompt_length[row]
            where = f"prompt {state.uid[row]}, sample {state.index[row]}, response token {position}"
            raise SpmdError(f"weights version {self.version} give NaN logits: {where}")

    def _finish(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> list[Sample]:
        """Let go of the rows whose newest token was their last."""
        stopped = (self.rows.stop_ids[rows] == tokens[:, None]).any(axis=1)
        if any(self._live.values()):
            names = zip(self.rows.uid[rows].tolist(), self.rows.index[rows].tolist(), strict=True)
            for order, (name, token) in enumerate(zip(names, tokens.tolist(), strict=True)):
                stop = self._live[name]
                if stop is not None and stop.push(token):
                    stopped[order] = True
        over = stopped | (self.rows.known(rows) == self.rows.limit[rows])
        if not over.any():
            return []
        ended = zip(self.scheduler.leave(rows[over].tolist()), stopped[over].tolist(), strict=True)
        return [self._end(request, "stop" if by_token else "length") for request, by_token in ended]

    def _end(self, request: Request, finish: FinishReason) -> Sample:
        del self._live[request.uid, request.index]
        return request.sample(finish)

"""The native engine: one step is schedule, run the model over paged KV, draw a token for each row that is ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spmd_rl.errors import ConfigError, DataError, ResidencyError, SpmdError
from spmd_rl.kernels import KvCache, PagedAttention, sample_tokens, stream_keys, token_logprobs
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.engine import EngineConfig, Progress, Request
from spmd_rl.rollout.native.pages import PagePool
from spmd_rl.rollout.native.pool_size import auto_pages
from spmd_rl.rollout.native.rows import Rows
from spmd_rl.rollout.native.scheduler import Plan, Scheduler
from spmd_rl.rollout.native.stop import StopStrings
from spmd_rl.types import FinishReason, Sample
from spmd_rl.weights.held import Held


class NativeEngine:
    """See `rollout.engine.Engine`. `decode` turns tokens into text; only stop strings need it."""

    def __init__(
        self,
        model: CausalLM,
        cfg: EngineConfig,
        device: torch.device,
        *,
        decode: Callable[[tuple[int, ...]], str] | None = None,
    ) -> None:
        self.model = model
        self.spec = spec = model.spec
        self.cfg = cfg
        self.device = device
        self.version: int | None = None
        self.num_pages = cfg.num_pages or auto_pages(spec, cfg, device)
        self.rows = Rows(cfg.max_batch, spec.max_positions, cfg.page_size)
        self.scheduler = Scheduler(
            self.rows,
            PagePool(self.num_pages),
            max_step_tokens=cfg.max_step_tokens,
            prefix_cache=cfg.prefix_cache,
            eos_ids=spec.eos_ids,
        )
        self._decode = lru_cache(maxsize=1 << 16)(decode) if decode else None
        self._live: dict[tuple[int, int], StopStrings | None] = {}
        self._num_steps = 0
        self._num_generated = 0
        self._cache: KvCache | None = None
        self.wake()

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def submit(self, request: Request) -> None:
        self._check(request)
        self._live[request.uid, request.index] = self._stop_strings(request)
        self.scheduler.add(request)

    @torch.inference_mode()
    def step(self) -> Progress:
        cache, version = self._ready()
        plan = self.scheduler.schedule()
        try:
            rows, tokens, logprobs = self._compute(plan, cache)
        except BaseException:
            # pages that the plan promised may never have been written, or hold NaN that would outlive their tokens
            self.sleep()
            self.wake()
            raise
        self.rows.append(rows, tokens, logprobs, version)
        self._num_steps += 1
        self._num_generated += len(rows)
        uids, indices = self.rows.uid[rows], self.rows.index[rows]
        return Progress(uids, indices, tokens, logprobs, finished=self._finish(rows, tokens))

    def abort(self, uid: int | None = None, index: int | None = None) -> list[Sample]:
        return [self._end(request, "abort") for request in self.scheduler.abort(uid, index)]

    def new_version(self, version: int) -> None:
        self.version = version
        self.scheduler.forget(version)

    def sleep(self) -> None:
        self.scheduler.forget(self.version or 0)
        self._cache = None

    def wake(self) -> None:
        if self._cache is None:
            spec = self.spec
            self._cache = KvCache(
                num_layers=spec.num_layers,
                num_pages=self.num_pages,
                page_size=self.cfg.page_size,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                dtype=getattr(torch, self.cfg.dtype),
                device=self.device,
            )

    def weights(self) -> Held:
        return Held.whole(dict(self.model.named_parameters()))

    def stats(self) -> dict[str, int]:
        return {
            "num_steps": self._num_steps,
            "num_generated_tokens": self._num_generated,
            "num_running": len(self.scheduler.running),
            "num_waiting": len(self.scheduler.waiting),
            "num_pages": self.num_pages,
            "num_evictions": self.scheduler.pool.num_evictions,
            "kv_bytes": self._cache.num_bytes if self._cache else 0,
            **asdict(self.scheduler.counters),
        }

    def _ready(self) -> tuple[KvCache, int]:
        if self._cache is None:
            raise ResidencyError("the engine is asleep: wake it before it generates")
        if self.version is None:
            raise SpmdError("the engine has no weights yet: push a version to it, or set load_weights")
        return self._cache, self.version

    def _check(self, request: Request) -> None:
        where, length, context = f"prompt {request.uid}", len(request.prompt), self.spec.max_positions
        if not length:
            raise DataError(where, "has no tokens")
        if length >= context:
            raise DataError(where, f"has {length} tokens, but the model's context is {context} including the answer")
        if request.prompt.min() < 0 or request.prompt.max() >= self.spec.vocab_size:
            raise DataError(where, f"has token ids outside the model's vocabulary of {self.spec.vocab_size}")
        limit = min(length + request.sampling.max_tokens, context)
        if request.num_tokens >= limit:
            raise DataError(where, f"sample {request.index} already has all {limit - length} tokens that it may have")
        if limit - 1 > self.num_pages * self.cfg.page_size:
            room = self.num_pages * self.cfg.page_size
            raise DataError(where, f"and its answer may need {limit - 1} tokens of KV memory; the pages hold {room}")
        if (request.uid, request.index) in self._live:
            raise SpmdError(f"prompt {request.uid}, sample {request.index} is in the engine already")

    def _stop_strings(self, request: Request) -> StopStrings | None:
        if not request.sampling.stop:
            return None
        if self._decode is None:
            raise ConfigError("stop strings need a tokenizer, and this engine was given none")
        stop = StopStrings(request.sampling.stop, self._decode)
        for token in request.tokens.tolist():
            stop.push(token)
        return stop

    def _compute(self, plan: Plan, cache: KvCache) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Run the model over `plan`; returns the rows that are ready for a token, the token and its log-prob."""
        if not len(plan.rows):
            return plan.rows, np.zeros(0, np.int64), np.zeros(0, np.float32)
        ends = np.cumsum(plan.lengths)
        row_of = np.repeat(plan.rows, plan.lengths)
        positions = np.arange(len(row_of)) + np.repeat(plan.starts + plan.lengths - ends, plan.lengths)
        page, offset = np.divmod(positions, self.cfg.page_size)
        attend = PagedAttention(
            cache,
            page_table=self.rows.pages[plan.rows, : int(page.max()) + 1],
            starts=plan.starts,
            lengths=plan.lengths,
            slots=self.rows.pages[row_of, page] * self.cfg.page_size + offset,
            num_heads=self.spec.num_heads,
        )
        tokens = self._tensor(self.rows.tokens[row_of, positions].astype(np.int64))
        ready = self.scheduler.ready(plan)
        last = self._tensor(ends[ready] - 1) if ready.any() else None
        out = self.model(tokens, self._tensor(positions), attend, last)
        self.scheduler.computed(plan)
        rows = plan.rows[ready]
        if last is None:
            return rows, np.zeros(0, np.int64), np.zeros(0, np.float32)
        return rows, *self._draw(rows, out)

    def _draw(self, rows: NDArray[np.int64], logits: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        state = self.rows
        inv_temperature = self._tensor(state.inv_temperature[rows])

        def unless(off: float, column: NDArray[Any]) -> torch.Tensor | None:
            values = column[rows]
            return self._tensor(values) if (values != off).any() else None

        drawn = sample_tokens(
            logits,
            inv_temperature,
            self._tensor(self._keys(rows)),
            greedy=unless(False, state.greedy),
            top_k=unless(0, state.top_k),
            top_p=unless(1, state.top_p),
            min_p=unless(0, state.min_p),
        )
        scored, _ = token_logprobs(logits, drawn, inv_temperature)
        tokens, logprobs = drawn.cpu().numpy(), scored.cpu().numpy()
        broken = np.flatnonzero(np.isnan(logprobs))
        if len(broken):
            row = rows[broken[0]]
            position = state.length[row] - state.prompt_length[row]
            raise SpmdError(
                f"weights version {self.version} give NaN logits: prompt {state.uid[row]}, sample {state.index[row]}, "
                f"response token {position}"
            )
        return tokens, logprobs

    def _keys(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        state, keys = self.rows, np.empty(len(rows), dtype=np.int64)
        position = state.length[rows] - state.prompt_length[rows]
        seeds = state.seed[rows]
        for seed in set(seeds.tolist()):
            same = seeds == seed
            keys[same] = stream_keys(seed, state.uid[rows[same]], state.index[rows[same]], position[same])
        return keys

    def _finish(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> list[Sample]:
        """Let go of the rows whose newest token was their last."""
        stopped = (self.rows.stop_ids[rows] == tokens[:, None]).any(axis=1)
        if any(self._live.values()):
            names = zip(self.rows.uid[rows].tolist(), self.rows.index[rows].tolist(), strict=True)
            for order, (name, token) in enumerate(zip(names, tokens.tolist(), strict=True)):
                stop = self._live[name]
                if stop is not None and stop.push(token):
                    stopped[order] = True
        over = stopped | (self.rows.length[rows] == self.rows.limit[rows])
        return [
            self._end(self.scheduler.leave(int(rows[order])), "stop" if stopped[order] else "length")
            for order in np.flatnonzero(over).tolist()
        ]

    def _end(self, request: Request, finish: FinishReason) -> Sample:
        del self._live[request.uid, request.index]
        return request.sample(finish)

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

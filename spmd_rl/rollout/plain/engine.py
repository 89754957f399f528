"""The plain engine: each step computes one token of every request that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from spmd_rl.errors import ResidencyError, SpmdError
from spmd_rl.kernels.contract import dtype_of
from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.model.foreign.network import ForeignLM
from spmd_rl.model.foreign.weights import foreign_weights
from spmd_rl.model.hf import fill
from spmd_rl.model.read import read_spec
from spmd_rl.model.weight_files import has_weights
from spmd_rl.offload.residency import Receipt
from spmd_rl.rollout.engine import Request, StepOutput
from spmd_rl.rollout.native.engine import NO_WEIGHTS
from spmd_rl.rollout.native.request_validator import RequestValidator
from spmd_rl.rollout.native.stop_strings import StopStringMatcher
from spmd_rl.rollout.plain.cohort import Cohort, Running
from spmd_rl.rollout.plain.config import PlainEngineConfig
from spmd_rl.rollout.plain.draw import draw
from spmd_rl.rollout.waiting_queue import WaitingQueue
from spmd_rl.types.prompts import prompt_name
from spmd_rl.types.samples import Sample
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.tensor_ends import TensorSink

FOLDER_VERSION = 0
TAGS = ("weights", "kv")  # what may sleep
Decode = Callable[[tuple[int, ...]], str]


class PlainEngine:
    """Implements `rollout.engine.Engine` over a network of `transformers` and its caches.

    `decode` turns tokens into text, which stop strings need. Requests wait until half of the places
    are free, so that many of equal length begin together. The engine has the weights of the folder
    from the first, if it has some and the config asks for them.
    Raises: ConfigError if the model folder does not serve.
    """

    def __init__(
        self, cfg: PlainEngineConfig, model: str, device: torch.device, decode: Decode
    ) -> None:
        self._spec, self._dtype = read_spec(model), getattr(torch, dtype_of(cfg.dtype, device))
        self._model = ForeignLM(self._spec, model).materialise(device, self._dtype)
        self._max_batch, self._device, self._decode = cfg.max_batch, device, decode
        self.version: int | None = None
        self.is_pushing = False
        self._cohorts: list[Cohort] = []
        self._waiting = WaitingQueue()
        self._keys: set[tuple[int, int]] = set()  # of all requests that are here
        self._validator = RequestValidator(self._spec, self._spec.max_positions)
        self._asleep: set[str] = set()
        self._num_steps = self._num_generated = 0
        if cfg.load_weights and has_weights(model):
            fill(self._model, foreign_weights(model))
            self._use_version(FOLDER_VERSION)

    @property
    def has_work(self) -> bool:
        return bool(self._keys)

    @property
    def load(self) -> tuple[int, int]:
        return len(self._keys) - len(self._waiting), len(self._waiting)

    def submit(self, request: Request) -> None:
        self._validator.check(request)
        key = request.uid, request.index
        if key in self._keys:
            name = prompt_name(request.uid)
            raise SpmdError(f"{name}, sample {request.index} is in the engine already")
        self._keys.add(key)
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> StepOutput:
        if self._asleep:
            raise ResidencyError("the engine is asleep: wake it before it generates")
        if self.version is None:
            raise SpmdError(NO_WEIGHTS)
        started = self._admit()
        rows = list(self._running())
        if not rows:
            return _output([], [], [])
        try:
            logits = torch.cat([self._logits(one) for one in self._cohorts])
            drawn = draw([row.request for row in rows], logits)
            if np.isnan(drawn.logprobs).any():
                raise SpmdError(f"weights version {self.version} give NaN logits")
        except BaseException:  # caches may have a token more than their rows
            self._forget_caches()
            raise
        kept = drawn.kept or [b""] * len(rows)
        values = drawn.tokens.tolist(), drawn.logprobs.tolist(), kept
        for row, *value in zip(rows, *values, strict=True):
            row.add(self.version, *value)
        self._num_steps += 1
        self._num_generated += len(rows)
        return _output(rows, self._finish(), started)

    def abort(self, uid: int | None = None, index: int | None = None) -> list[Sample]:
        def is_meant(one: Request) -> bool:
            return uid in (None, one.uid) and index in (None, one.index)

        ended = [one for one in self._requests() if is_meant(one)]
        self._waiting.replace([one for one in self._waiting if not is_meant(one)])
        self._keep([row for row in self._running() if not is_meant(row.request)])
        self._keys -= {(one.uid, one.index) for one in ended}
        return [one.sample("aborted") for one in ended]

    def snapshot(self) -> list[Sample]:
        return [one.sample("aborted") for one in self._requests()]

    def sleep(self, tags: tuple[str, ...] = ()) -> list[Receipt]:
        """Forget keys and values: torch's allocator gives their memory to whoever asks next.

        Weights stay where they are, whatever the tags say.
        """
        self._asleep |= set(tags or TAGS)
        self._forget_caches()
        return []

    def wake(self, tags: tuple[str, ...] = ()) -> list[Receipt]:
        self._asleep -= set(tags or TAGS)
        return []

    def sink(self) -> TensorSink:
        weights = LocalTensors.whole(dict(self._model.named_parameters()))
        return TensorSink(weights.items(), self._begin_push, self._use_version, self._outdate)

    def contract(self) -> dict[str, str | int]:
        return self._model.contract(self._device, self._dtype)

    def stats(self) -> dict[str, int]:
        num_running, num_waiting = self.load
        return {
            "num_steps": self._num_steps,
            "num_generated_tokens": self._num_generated,
            "num_running": num_running,
            "num_waiting": num_waiting,
        }

    def _begin_push(self) -> None:
        self.version, self.is_pushing = None, True

    def _outdate(self) -> None:
        self.version = None

    def _use_version(self, version: int) -> None:
        self.version, self.is_pushing = version, False
        self._forget_caches()

    def _forget_caches(self) -> None:
        for cohort in self._cohorts:
            cohort.cache = None

    def _requests(self) -> list[Request]:
        return [*(row.request for row in self._running()), *self._waiting]

    def _running(self) -> Iterator[Running]:
        return (row for cohort in self._cohorts for row in cohort.rows)

    def _admit(self) -> list[tuple[int, int]]:
        """Begin requests that wait, those of equal length together; return their keys."""
        num_running = self.load[0]
        if num_running > self._max_batch // 2:
            return []
        count = min(self._max_batch - num_running, len(self._waiting))
        begun = [self._waiting.popleft() for _ in range(count)]
        cohorts: dict[int, Cohort] = {}
        for request in begun:
            cohort = cohorts.setdefault(request.num_tokens, Cohort([]))
            cohort.rows.append(self._begin(request))
        self._cohorts += cohorts.values()
        return [(one.uid, one.index) for one in begun]

    def _begin(self, request: Request) -> Running:
        if not request.sampling.stop:
            return Running(request, None)
        matcher = StopStringMatcher(request.sampling.stop, self._decode)
        for token in request.past.tokens.tolist():
            matcher.push(token)
        return Running(request, matcher)

    def _logits(self, cohort: Cohort) -> Tensor:
        tokens = upload(cohort.inputs(), self._device)
        logits, cohort.cache = self._model.next_logits(tokens, cohort.cache)
        return logits

    def _finish(self) -> list[Sample]:
        """Remove the rows whose newest token was their last, and return their samples."""
        ended, left = list[Sample](), list[Running]()
        for row in self._running():
            is_stopped = row.is_stopped(self._spec.eos_ids)
            if is_stopped or row.is_full(self._spec.max_positions):
                self._keys.discard((row.request.uid, row.request.index))
                ended.append(row.request.sample("completed" if is_stopped else "truncated"))
            else:
                left.append(row)
        self._keep(left)
        return ended

    def _keep(self, left: list[Running]) -> None:
        """Go on with these rows alone."""
        kept = set(left)
        for cohort in self._cohorts:
            cohort.keep(kept)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]


def _output(
    rows: list[Running], finished: list[Sample], started: list[tuple[int, int]]
) -> StepOutput:
    asked = [row.request for row in rows]
    return StepOutput(
        np.array([one.uid for one in asked], np.int64),
        np.array([one.index for one in asked], np.int64),
        np.array([one.past.tokens[-1] for one in asked], np.int64),
        np.array([one.past.logprobs[-1] for one in asked], np.float32),
        finished,
        started,
        [0] * len(started),
    )

"""Engine of a rank whose scheduler is not the first of its tensor-parallel group.

The first rank's engine has the requests, and SGLang passes them on. This rank keeps its child alive
and gives it its part of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from spmd_rl.errors import WeightsError
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.residency import Receipt
from spmd_rl.rollout.engine import Request, StepOutput
from spmd_rl.rollout.native.request_validator import RequestValidator
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.launch import Child
from spmd_rl.rollout.sglang.messages import CallDone
from spmd_rl.rollout.sglang.rank_engine import RankEngine
from spmd_rl.rollout.sglang.sink import SglangSink
from spmd_rl.types.samples import Sample
from spmd_rl.weights.plan.layout import Box


class PassedOnCalls:
    """Calls of the scheduler on a rank that is not the first: SGLang passes the first one's on."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def start_call(self, method: str) -> None:
        """Do nothing: the first rank begins the call."""

    def finish_call(self, method: str, deadline_s: float) -> None:
        """Wait until this rank's scheduler has done what the first rank began.

        Raises: WeightsError with what the method raised; DeadlineError; LostRankError.
        """
        answer = self._child.socket.receive(deadline_s)
        if answer != CallDone(method):
            raise WeightsError(f"{self._child.name} sent {answer} in place of the end of {method}")


class SglangFollower(RankEngine):
    """Implements `rollout.engine.Engine`. Each request ends at once, without a token.

    Nobody reads these samples: a call is answered by the first rank of a shard (shard_turns.py).
    """

    def __init__(
        self,
        child: Child,
        cfg: SglangEngineConfig,
        spec: ModelSpec,
        boxes: Mapping[str, Box],
        *,
        dtype: str,
        device: torch.device,
        max_kv_tokens: int,
    ) -> None:
        super().__init__(child, cfg)
        self._validator = RequestValidator(spec, max_kv_tokens)
        self._ended: dict[tuple[int, int], Sample] = {}
        self._sink = SglangSink(
            self,
            child,
            PassedOnCalls(child),
            spec.parameter_shapes(),
            boxes,
            dtype,
            device,
            slab_bytes=cfg.slab_bytes,
            deadline_s=cfg.answer_deadline_s,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._ended)

    def submit(self, request: Request) -> None:
        self._validator.check(request)
        self._ended[request.uid, request.index] = request.sample("aborted")

    def step(self) -> StepOutput:
        """Return all requests since the last step, without a token."""
        finished = list(self._ended.values())
        self._ended.clear()
        none = np.zeros(0, np.int64)
        return StepOutput(none, none, none, np.zeros(0, np.float32), finished)

    def abort(self, uid: int | None = None, index: int | None = None) -> list[Sample]:
        """Return the requests of `uid` and `index`, and forget them."""
        matching = [key for key in self._ended if uid in (None, key[0]) and index in (None, key[1])]
        return [self._ended.pop(key) for key in matching]

    def sleep(self, tags: tuple[str, ...] = ()) -> list[Receipt]:
        """Note what sleeps: the first rank waits until all schedulers have given it back."""
        self.state.begin_sleep(0, tags)
        return []

    def wake(self, tags: tuple[str, ...] = ()) -> list[Receipt]:
        """Note what is awake."""
        self.state.begin_wake(tags)
        return []

    def snapshot(self) -> list[Sample]:
        return list(self._ended.values())

    def open_push(self) -> None:
        """Note that a push begins; the first rank has the scheduler become idle."""
        if not self.state.is_pushing:
            self.state.begin_push()

    def commit_push(self, version: int) -> None:
        self.state.end_push(version)

    @property
    def load(self) -> tuple[int, int]:
        """Return the load of an engine without requests."""
        return 0, 0

    def stats(self) -> dict[str, int]:
        """Return the counts of an engine without requests."""
        names = ("num_steps", "num_generated_tokens", "num_aborted", "num_running", "num_waiting")
        return dict.fromkeys(names, 0)

    def close(self) -> None:
        """End the child. The engine is of no use after that."""
        self.child.stop()

"""TpFollower: the engine of a rank that is not the first of those that share a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spmd_rl.rollout.engine import Request, StepOutput
from spmd_rl.rollout.native.tp.news import RequestReader, Submitted, decode
from spmd_rl.rollout.native.tp.tp_rank import TpRank
from spmd_rl.types.samples import Sample

if TYPE_CHECKING:
    from spmd_rl.rollout.native.engine import NativeEngine


class TpFollower(TpRank):
    """Implements `rollout.engine.Engine`. It draws what the first rank's engine draws.

    Requests come by `follow`. One that is submitted here ends at once, without a token. Nobody
    reads these samples: a call is answered by the first rank of a shard (shard_turns.py).
    """

    def __init__(self, own: NativeEngine) -> None:
        super().__init__(own)
        self._reader = RequestReader()
        self._steps = False  # the first rank takes a step now
        self._ended: dict[tuple[int, int], Sample] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._ended)

    def submit(self, request: Request) -> None:
        self.own.check(request)
        self._ended[request.uid, request.index] = request.sample("aborted")

    def abort(self, uid: int | None = None, index: int | None = None) -> list[Sample]:
        """Return what was submitted here of `uid` and `index`, and forget it."""
        matching = [key for key in self._ended if uid in (None, key[0]) and index in (None, key[1])]
        return [self._ended.pop(key) for key in matching]

    def snapshot(self) -> list[Sample]:
        return list(self._ended.values())

    def follow(self, news: bytes) -> None:
        """Do what the first rank has done; the next `step` is its step if it takes one."""
        told = decode(news)
        for event in told.events:
            if isinstance(event, Submitted):
                self.own.submit(self._reader.request(event))
            else:
                self.own.abort(event.uid, event.index)
        self._steps = told.steps

    def step(self) -> StepOutput:
        """Take the first rank's step, and return what was submitted here, without a token.

        Blocks: in a step, until the other ranks take it.
        """
        steps, self._steps = self._steps, False
        if steps:
            self.own.step()
        finished = list(self._ended.values())
        self._ended.clear()
        none = np.zeros(0, np.int64)
        return StepOutput(none, none, none, np.zeros(0, np.float32), finished)

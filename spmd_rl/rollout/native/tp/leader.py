"""TpLeader: the engine of the first rank of those that share a model. It has the requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd_rl.rollout.engine import Request, StepOutput
from spmd_rl.rollout.native.tp.news import Aborted, News, RequestWriter, Submitted, encode
from spmd_rl.rollout.native.tp.tp_rank import TpRank
from spmd_rl.types.samples import Sample

if TYPE_CHECKING:
    from spmd_rl.rollout.native.engine import NativeEngine


class TpLeader(TpRank):
    """Implements `rollout.engine.Engine`. The other ranks must have its `news` before each step."""

    def __init__(self, own: NativeEngine) -> None:
        super().__init__(own)
        self._writer = RequestWriter()
        self._untold: list[Submitted | Aborted] = []

    @property
    def has_work(self) -> bool:
        return self.own.has_work

    def submit(self, request: Request) -> None:
        copy = self._writer.copy(request)
        self.own.submit(copy)
        self._untold.append(self._writer.event(request, copy))

    def abort(self, uid: int | None = None, index: int | None = None) -> list[Sample]:
        self._untold.append(Aborted(uid, index))
        return self.own.abort(uid, index)

    def snapshot(self) -> list[Sample]:
        return self.own.snapshot()

    def news(self, steps: bool) -> bytes:
        """Return what the other ranks do not know yet, and whether a step follows."""
        events, self._untold = self._untold, []
        return encode(News(events, steps))

    def step(self) -> StepOutput:
        """Compute one batch of tokens. Blocks: until the other ranks take the step."""
        return self.own.step()

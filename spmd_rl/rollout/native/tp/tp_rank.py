"""TpRank: what the first rank of a tensor-parallel engine and the others have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmd_rl.offload.residency import Receipt

if TYPE_CHECKING:
    from spmd_rl.rollout.native.engine import NativeEngine
    from spmd_rl.weights.tensor_ends import TensorSink


class TpRank:
    """This rank's part of the engine: an engine of its own over a part of the model."""

    def __init__(self, own: NativeEngine) -> None:
        self.own = own

    @property
    def version(self) -> int | None:
        return self.own.version

    @property
    def is_pushing(self) -> bool:
        return self.own.is_pushing

    @property
    def load(self) -> tuple[int, int]:
        return self.own.load

    def sleep(self, tags: tuple[str, ...] = ()) -> list[Receipt]:
        return self.own.sleep(tags)

    def wake(self, tags: tuple[str, ...] = ()) -> list[Receipt]:
        return self.own.wake(tags)

    def sink(self) -> TensorSink:
        return self.own.sink()

    def contract(self) -> dict[str, str | int]:
        return self.own.contract()

    def stats(self) -> dict[str, int]:
        return self.own.stats()

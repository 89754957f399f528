"""RankEngine: what an engine with requests and a follower of one have in common."""

from __future__ import annotations

from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.launch import Child
from spmd_rl.rollout.sglang.sink import SglangSink
from spmd_rl.rollout.sglang.state import EngineState


class RankEngine:
    """The child of a rank, what may follow what, and where a push puts weights."""

    _sink: SglangSink

    def __init__(self, child: Child, cfg: SglangEngineConfig) -> None:
        self.child = child
        self.cfg = cfg
        self.state = EngineState(cfg.sleep_weights)

    @property
    def version(self) -> int | None:
        return self.state.version

    @property
    def is_pushing(self) -> bool:
        return self.state.is_pushing

    def sink(self) -> SglangSink:
        """Return where a push puts this rank's part of the weights."""
        return self._sink

    def contract(self) -> None:
        """Return None: SGLang promises no bits that a trainer could have too."""

"""Recipe that pushes weights between two toy roles, for the tests beside it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.capabilities import Sleeper, WeightProvider, WeightReceiver
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.endpoint import Role, Sharded, collective
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.mesh.split import Split

ROWS, COLUMNS = 6, 4


class Source(Role, WeightProvider):
    """Holds its rows of one tensor."""

    def __init__(self, cfg: "Config", context: RoleContext) -> None:
        import torch

        super().__init__(cfg, context)
        self.before_change: Callable[[], None] = lambda: None
        num_rows = ROWS if cfg.fault == "replicas" else -(-ROWS // context.size)
        self.rows = torch.zeros(num_rows, COLUMNS)

    def call_before_change(self, callback: Callable[[], None]) -> None:
        self.before_change = callback

    def on_weights_pushed(self, version: int) -> None: ...

    @collective
    def fill(self, value: float) -> None:
        self.before_change()
        self.rows.fill_(value + self.context.rank)

    def weight_source(self) -> Any:
        from spmd_rl.weights.local_tensors import LocalTensor
        from spmd_rl.weights.plan.layout import chunk_box
        from spmd_rl.weights.tensor_ends import TensorSource

        parts = (0, 1) if self.cfg.fault == "replicas" else (self.context.rank, self.context.size)
        box = chunk_box((ROWS, COLUMNS), *parts)
        return TensorSource([("w", LocalTensor((ROWS, COLUMNS), box, self.rows))])


class Sink(Role, WeightReceiver, Sleeper):
    """Holds the whole tensor."""

    def __init__(self, cfg: "Config", context: RoleContext) -> None:
        import torch

        super().__init__(cfg, context)
        self.whole = torch.full((ROWS, COLUMNS), -1.0)
        self.version = -1

    def weight_sink(self) -> Any:
        from spmd_rl.weights.local_tensors import LocalTensors
        from tests.dist.control.faulty_sinks import SINKS

        tensors = LocalTensors.whole({"w": self.whole})
        return SINKS[self.cfg.fault](tensors.items(), self.stale, self.use)

    def use(self, version: int) -> None:
        self.version = version

    def stale(self) -> None:
        self.version = -3

    @collective
    def look(self) -> Sharded[list[tuple[int, list[float]]]]:
        return [(self.version, self.whole[:, 0].tolist())]

    @collective
    def sleep(self) -> None:
        self.version = -2

    @collective
    def wake(self) -> None: ...


@dataclass(frozen=True)
class Config:
    split: Split = field(default_factory=Split)
    run: RunConfig = field(default_factory=RunConfig)
    fault: str = ""  # "flip": a bit changes on its way; "blind": a digest that is not of now


def main(ctl: Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    source = ctl.spawn(Source, cfg, on=roles.train)
    sink = ctl.spawn(Sink, cfg, on=roles.infer)
    link = ctl.link(source, sink)
    rows = ROWS // roles.train.size
    for version in range(3):
        source.fill.call(10.0 * version)
        stats = link.push(version)
        expected = [10.0 * version + rank for rank in range(roles.train.size) for _ in range(rows)]
        assert sink.look.call() == [(version, expected)] * roles.infer.size
    for step in ctl.steps(1):
        with ctl.phase("train", awake=[source]):
            slept = sink.look.call()[0][0] == -2
        with ctl.phase("rollout", awake=[sink]):
            pass
        print(
            stats.route,
            stats.bytes_moved,
            f"verified {stats.num_verified} shared {stats.num_shared} of {stats.num_tensors}",
            "slept" if slept else "stayed",
            sorted(step.phase_s),
            flush=True,
        )

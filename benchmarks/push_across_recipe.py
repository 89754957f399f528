"""Recipe that pushes random weights between ranks, in turn with plain transfers between the same
ranks, for push_across_gpus.py.

    spmd-rl run benchmarks.push_across_recipe --nproc 2 --folder FOLDER \\
        --split.train.ranks=1 --split.infer.ranks=1

The masters are shards as FSDP2 makes them, and each engine has the whole model in bfloat16. The
first push is compared and checks the comparison; no later one is. Nothing in a push waits for the
GPU: times are those between CUDA events, which are read when the device is idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

import spmd_rl as rl
from benchmarks.push_recipe import engine
from spmd_rl.controller.handle import Handle
from spmd_rl.controller.link import link_placement
from spmd_rl.model.read import read_spec

if TYPE_CHECKING:
    from spmd_rl.weights.local_tensors import LocalTensors

FILE = "pushes.json"
WARM_UPS, TURNS = 3, 12
NUM_PAGES = 64  # of keys and values, which nothing here needs


@dataclass(frozen=True)
class Config:
    folder: str  # with the config.json of this shape
    masters: str = "float32"  # their dtype
    buffer_bytes: tuple[int, ...] = (512 << 20, 2 << 30)  # of plain transfers, for each pair
    transfers: int = 4  # plain transfers of a buffer, one after the other
    run: rl.RunConfig = field(default_factory=lambda: rl.RunConfig(verify_every=1000))
    split: rl.Split = field(default_factory=rl.Split)


class Clock:
    """Moments of the device by name, once it has done what was queued before each.

    On a GPU they are events. The GPU has to be idle at the first of them.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._moments: dict[str, Any] = {}

    def mark(self, name: str) -> None:
        """Note this moment of the current stream. It waits for nothing."""
        import torch

        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._moments[name] = event
        else:
            self._moments[name] = time.perf_counter()

    def seconds(self, began: str, ended: str) -> float:
        """Return the time between two moments. Blocks: until the device is idle."""
        import torch

        first, last = self._moments[began], self._moments[ended]
        if self.device.type != "cuda":
            return float(last - first)
        torch.cuda.synchronize(self.device)
        return float(first.elapsed_time(last)) * 1e-3


def shards(folder: str, dtype: str, part: int, num_parts: int, device: Any) -> LocalTensors:
    """Return this part of random weights, by the rows that FSDP2 gives to it."""
    import torch

    from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors
    from spmd_rl.weights.plan.layout import chunk_box

    found = {}
    for name, shape in read_spec(folder).parameter_shapes().items():
        box = chunk_box(shape, part, num_parts)
        local = torch.randn(box.extent, dtype=getattr(torch, dtype), device=device)
        found[name] = LocalTensor(tuple(shape), box, local)
    return LocalTensors(found)


class Masters(rl.Role, rl.WeightProvider):
    """Random master weights, sharded over the role's ranks, in place of a trainer's."""

    def __init__(self, cfg: Config, context: rl.RoleContext) -> None:
        super().__init__(cfg, context)
        part, num_parts = context.rank, context.size
        self.tensors = shards(cfg.folder, cfg.masters, part, num_parts, context.device)

    def weight_source(self) -> Any:
        from spmd_rl.weights.tensor_ends import TensorSource

        return TensorSource(self.tensors.items())

    def call_before_change(self, callback: Callable[[], None]) -> None: ...

    def on_weights_pushed(self, version: int) -> None: ...


class TimedSink:
    """A sink that notes when a push opens it, when it has all bytes, and when it can generate.

    Everything else is the engine's own sink. `host_s` is what the host took to queue the transfer.
    """

    def __init__(self, sink: Any, clock: Clock) -> None:
        self._sink, self._clock = sink, clock
        self.host_s = self._opened_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def open(self) -> None:
        self._opened_at = time.perf_counter()
        self._clock.mark("open")
        self._sink.open()

    def flush(self) -> Any:
        found = self._sink.flush()
        self._clock.mark("flush")  # the last one counts
        self.host_s = time.perf_counter() - self._opened_at
        return found

    def commit(self, version: int) -> None:
        self._sink.commit(version)
        self._clock.mark("commit")


@dataclass(frozen=True)
class Received:
    """A push as one engine saw it: seconds until it had all bytes, and until it could generate.

    `host_s` is the part of the first that the host took to queue it.
    """

    transfer_s: float
    pause_s: float
    host_s: float


@dataclass(frozen=True)
class Push:
    """A push as the controller and each engine saw it."""

    seconds: float
    num_verified: int
    received: list[Received]


@dataclass(frozen=True)
class Measured:
    """All pushes of a run, and the plain transfers between them.

    `plain` has, for each size of a buffer, the seconds of each receiving rank in each turn.
    `gathers` has those of the all-gathers in which a rank receives as much as in a push.
    """

    num_sources: int
    num_receivers: int
    num_senders: int  # to one receiver
    received_bytes: int  # by one receiver, from other ranks
    local_bytes: int  # of one receiver, which its own rank holds
    transfers: int
    pushes: list[Push] = field(default_factory=list)
    plain: dict[int, list[list[float]]] = field(default_factory=dict)
    gathers: list[list[float]] = field(default_factory=list)


class Receiver(rl.Role, rl.WeightReceiver):
    """A native engine that generates nothing."""

    def __init__(self, cfg: Config, context: rl.RoleContext) -> None:
        super().__init__(cfg, context)
        self.engine = engine(cfg.folder, context.device, NUM_PAGES)
        self.clock = Clock(context.device)
        self.sink = TimedSink(self.engine.sink(), self.clock)

    def weight_sink(self) -> Any:
        return self.sink

    @rl.collective
    def received(self) -> rl.Sharded[list[Received]]:
        """Return what each rank saw of the last push. Blocks: until its GPU is idle."""
        transfer_s, pause_s = (self.clock.seconds("open", end) for end in ("flush", "commit"))
        return [Received(transfer_s, pause_s, self.sink.host_s)]


class Wire(rl.Role):
    """Plain transfers between the ranks of a link, in the process group of its pushes."""

    @rl.collective
    def drain(self) -> None:
        """Wait for the GPU."""
        import torch

        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)

    @rl.collective
    def send_and_receive(
        self, sources: list[int], receivers: list[int], num_bytes: int, repeats: int
    ) -> rl.Sharded[list[float]]:
        """Have all sources send a buffer to all receivers at once, `repeats` times; return each
        rank's seconds.
        """
        import torch

        own, group = self.context.world.rank, self.context.group
        to = [rank for rank in receivers if own in sources and rank != own]
        of = [rank for rank in sources if own in receivers and rank != own]
        buffers = torch.zeros(1 + len(of), num_bytes, dtype=torch.uint8, device=self.context.device)
        dist = torch.distributed
        moves = [dist.P2POp(dist.isend, buffers[0], rank, group) for rank in to]
        moves += [
            dist.P2POp(dist.irecv, buffer, rank, group)
            for rank, buffer in zip(of, buffers[1:], strict=True)
        ]

        def exchange() -> None:
            for work in dist.batch_isend_irecv(moves) if moves else ():
                work.wait()

        return [self._seconds(exchange, repeats)]

    @rl.collective
    def all_gather(self, num_bytes: int) -> rl.Sharded[list[float]]:
        """Gather `num_bytes` of each rank on all of them; return each rank's seconds."""
        import torch

        context = self.context
        own = torch.zeros(num_bytes, dtype=torch.uint8, device=context.device)
        whole = own.new_empty(context.size * num_bytes)
        gather = torch.distributed.all_gather_into_tensor  # torch 2.11 has no all_gather_single
        return [self._seconds(lambda: gather(whole, own, group=context.group), 1)]

    def _seconds(self, work: Callable[[], object], repeats: int) -> float:
        """Return the time of `work`, which all ranks begin together on an idle device."""
        clock = Clock(self.context.device)
        self.drain()
        self.context.barrier()
        clock.mark("began")
        for _ in range(repeats):
            work()
        clock.mark("ended")
        return clock.seconds("began", "ended")


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    source = ctl.spawn(Masters, cfg, on=roles.train)
    receiver = ctl.spawn(Receiver, cfg, on=roles.infer)
    link = ctl.link(source, receiver)
    placement = link_placement(cast(Handle, source), cast(Handle, receiver))
    wire = ctl.spawn(Wire, cfg, on=placement, name="wire")
    sources, receivers = list(roles.train.ranks), list(roles.infer.ranks)
    measured = Measured(
        num_sources=len(sources),
        num_receivers=len(receivers),
        num_senders=len(set(sources) - {receivers[0]}),
        received_bytes=link.plan.wire_bytes // len(receivers),
        local_bytes=link.plan.local_bytes // len(receivers),
        transfers=cfg.transfers,
        plain={size: [] for size in cfg.buffer_bytes},
    )
    for version in range(WARM_UPS + TURNS):
        wire.drain.call()
        stats = link.push(version)
        push = Push(stats.seconds, stats.num_verified, receiver.received.call())
        measured.pushes.append(push)
        for size, turns in measured.plain.items():
            times = wire.send_and_receive.call(sources, receivers, size, cfg.transfers)
            turns.append([times[placement.ranks.index(rank)] for rank in receivers])
        if sources == receivers:
            from_each = measured.received_bytes // measured.num_senders
            measured.gathers.append(wire.all_gather.call(from_each))
    Path(cfg.run.path, FILE).write_bytes(msgspec.json.encode(measured))

"""Memory of a trainer's rank at each point of a step, on the GPU and on the host. Pure.

    gather      weights are cast to the compute dtype, and gathered
    compute     forward and backward of the micro-batches, which sum gradients
    reduce      the last backward pass ends: a unit's gradients are copied before they are reduced
    update      the optimizer's step

Without offload everything but the temporary parts is on the GPU all the time, and `compute` needs
most. With `trainer.backend.offload` = "moments" the optimizer's state is on the host, and chunks of
it pass through the GPU in `update`. With "master" the float32 weights are on the host too, and on
the GPU only in `gather` and `update`.

Units: bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from spmd_rl.offload.ledger import Entry, Ledger, Phase, as_size

Offload = Literal["none", "moments", "master"]


@dataclass(frozen=True)
class StepSizes:
    """What there is of each class on one rank.

    `layer_copies` and `unit_copies` are what FSDP needs to reduce the gradients of a layer and of
    its largest unit. `chunks` are the slots that offloaded moments pass through. `kept` is what
    activations take of the host.
    """

    master: int
    moments: int
    grads: int
    gathered: int
    activations: int
    layer_copies: int = 0
    unit_copies: int = 0
    chunks: int = 0
    kept: int = 0


@dataclass(frozen=True)
class Point:
    """A point of a step, and the bytes of each class on the GPU and on the host."""

    name: str
    gpu: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def gpu_bytes(self) -> int:
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def step_points(sizes: StepSizes, offload: Offload) -> tuple[Point, ...]:
    """Return the points of a step in their order."""
    state = {"moments": sizes.moments} if offload == "none" else {}
    awake = {"master": sizes.master} | state
    computing = state if offload == "master" else awake
    host = {} if offload == "none" else {"moments": sizes.moments}
    # the host copy of sleeping weights has its place all the time
    host |= {"master": sizes.master} if offload == "master" else {}
    gathered, grads = {"gathered": sizes.gathered}, {"grads": sizes.grads}
    working = gathered | grads | {"activations": sizes.activations, "copies": sizes.layer_copies}
    chunks = {} if offload == "none" else {"chunks": sizes.chunks}
    kept = {"activations": sizes.kept}
    return (
        Point("gather", awake | gathered, host),
        Point("compute", computing | working, host | kept),
        Point("reduce", computing | grads | {"copies": sizes.unit_copies}, host | kept),
        Point("update", awake | grads | chunks, host | kept),
    )


def step_ledger(sizes: StepSizes, offload: Offload) -> Ledger:
    """Return the ledger of a trainer, whose train phase is the point that needs most of the GPU."""
    most = max(step_points(sizes, offload), key=lambda point: point.gpu_bytes)
    always = {"master": sizes.master} | ({"moments": sizes.moments} if offload == "none" else {})
    others: tuple[Phase, ...] = ("sync", "rollout")
    entries = [
        Entry(tag, num_bytes, (*others, "train") if tag in most.gpu else others)
        for tag, num_bytes in always.items()
    ]
    working = ("grads", "gathered", "activations", "copies", "chunks")
    entries += [Entry(tag, most.gpu.get(tag, 0), ("train",)) for tag in working]
    return Ledger(tuple(entries))


def table(points: Sequence[Point]) -> Iterator[str]:
    """Yield the lines of a table: for each point, what is on the GPU and what on the host."""
    for where, at in (("GPU", "gpu"), ("host", "host")):
        by_point = [getattr(point, at) for point in points]
        tags = dict.fromkeys(tag for sizes in by_point for tag, size in sizes.items() if size)
        if not tags:
            continue
        yield f"{where:14}" + "".join(f"{point.name:>12}" for point in points)
        for tag in tags:
            cells = [as_size(sizes[tag]) if sizes.get(tag) else "-" for sizes in by_point]
            yield f"  {tag:12}" + "".join(f"{cell:>12}" for cell in cells)
        yield f"  {'all':12}" + "".join(f"{as_size(sum(s.values())):>12}" for s in by_point)

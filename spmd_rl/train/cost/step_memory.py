"""Memory of a trainer's rank at each point of a step, on the GPU and on the host. Pure.

    gather      weights are cast to the compute dtype, and gathered
    head        the head's forward and backward pass, when all layers keep what they do
    backward    the backward pass of the last layer; gradients are summed
    reduce      the last backward pass ends: a unit's gradients are copied before they are reduced
    update      the optimizer's step

With `trainer.backend.offload` = "moments" the optimizer's state is on the host, and chunks of it
pass through the GPU in `update`. With "master" the float32 weights are on the host too, and on the
GPU only in `gather` and `update`.

Units: bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from spmd_rl.offload.ledger import TagBytes, as_size
from spmd_rl.train.cost.activation_memory import Activations
from spmd_rl.train.optimizer.moment_chunks import CHUNK_ELEMENTS, NUM_SLOTS
from spmd_rl.train.optimizer.parameter_groups import FP32_BYTES

NUM_MOMENTS = 2  # AdamW's, the only ones that are offloaded
CHUNKS_BYTES = NUM_SLOTS * NUM_MOMENTS * CHUNK_ELEMENTS * FP32_BYTES  # that they pass through
Offload = Literal["none", "moments", "master"]
WORK = ("grads", "gathered", "activations", "copies", "chunks")


@dataclass(frozen=True)
class StepSizes:
    """What there is of each class on one rank.

    `grads` are those of the backward passes, and `reduced_grads` those of the optimizer's step.
    `kept_copies` are what FSDP keeps of a gather until the first forward pass ends, where the model
    is one unit of several shards. `gather_copies`, `layer_copies` and `unit_copies` are what FSDP
    needs to gather a unit, and to reduce the gradients of a layer and of its largest unit.
    """

    master: int
    moments: int
    grads: int
    reduced_grads: int
    gathered: int
    activations: Activations
    kept_copies: int = 0
    gather_copies: int = 0
    layer_copies: int = 0
    unit_copies: int = 0


@dataclass(frozen=True)
class StepPoint:
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


def step_points(sizes: StepSizes, offload: Offload) -> tuple[StepPoint, ...]:
    """Return the points of a step in their order."""
    state = {"moments": sizes.moments} if offload == "none" else {}
    awake = {"master": sizes.master} | state
    computing = state if offload == "master" else awake
    host = {} if offload == "none" else {"moments": sizes.moments}
    # the host copy of sleeping weights has its place all the time
    host |= {"master": sizes.master} if offload == "master" else {}
    kept, grads = sizes.activations, {"grads": sizes.grads}
    working = computing | grads | {"gathered": sizes.gathered}
    head = working | {
        "activations": kept.kept + kept.head,
        # the first micro-batch has these copies and no gradients, a later one the reverse
        "copies": max(0, sizes.kept_copies - sizes.grads),
    }
    backward = working | {
        "activations": kept.kept + kept.backward,
        "copies": sizes.layer_copies,
    }
    chunks = {} if offload == "none" else {"chunks": CHUNKS_BYTES}
    on_host = host | {"activations": kept.host}
    return (
        StepPoint(
            "gather", awake | {"gathered": sizes.gathered, "copies": sizes.gather_copies}, on_host
        ),
        StepPoint("head", head, on_host),
        StepPoint("backward", backward, on_host),
        StepPoint("reduce", computing | grads | {"copies": sizes.unit_copies}, on_host),
        StepPoint("update", awake | {"grads": sizes.reduced_grads} | chunks, on_host),
    )


def moments_tag(num_bytes: int, offload: Offload) -> TagBytes:
    """Return the tag of the optimizer's state, on the GPU or in host memory."""
    if offload == "none":
        return TagBytes("moments", num_bytes, "save")
    return TagBytes("moments", 0, "fixed", host_bytes=num_bytes)


def step_memory(sizes: StepSizes, offload: Offload) -> list[TagBytes]:
    """Return the memory of a trainer by tag. Its work is that of the point that needs most."""
    most = max(step_points(sizes, offload), key=lambda point: point.gpu_bytes)
    is_on_host = offload == "master"
    memory = [
        TagBytes(
            "master",
            sizes.master,
            "save",
            host_bytes=sizes.master if is_on_host else 0,
            is_away_in_work="master" not in most.gpu,
        )
    ]
    memory.append(moments_tag(sizes.moments, offload))
    host = {"activations": sizes.activations.host}
    return memory + [TagBytes(tag, most.gpu.get(tag, 0), "work", host.get(tag, 0)) for tag in WORK]


def table(points: Sequence[StepPoint]) -> Iterator[str]:
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

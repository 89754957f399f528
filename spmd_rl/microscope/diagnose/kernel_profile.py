"""Profile of one forward pass: which kernels each op ran.

On a GPU these are the kernels that were launched between two marks. On a CPU they are the outermost
torch ops within our functions.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from spmd_rl.microscope.diagnose.kernel_names import FLASH, FLASH_COMBINE, KernelInfo, identify
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.replay.forward_pass import ForwardPass
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import MARK, ProfilerTap

HOPPER_MAJOR = 9  # of its compute capability
OUR_MERGE = "_merge"  # our kernel that merges softmaxes
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_COPIES = re.compile(
    r"FillFunctor|direct_copy_kernel|gather_kernel|index_(elementwise|copy|select)"
    r"|CatArrayBatchedCopy"
)
# Ops that move or make numbers, but compute none.
_MOVES = re.compile(
    r"aten::(view|reshape|empty\w*|as_strided|select|slice|narrow|t|transpose|permute|unsqueeze"
    r"|squeeze|flatten|unflatten|expand|contiguous|detach|alias|to|copy_|chunk|split|tensor_split"
    r"|index_select|clone|resolve_\w+|lift_fresh|item|_unsafe_view|index_copy_?|repeat_interleave"
    r"|arange|zeros|ones|fill_|cat|pad|index|is_nonzero|new_\w+|constant_pad_nd|unbind|resize_"
    r"|zero_|view_as|split_with_sizes|_reshape_alias)$"
)

KernelsByPoint = Mapping[tuple[int, Point], tuple[KernelInfo, ...]]


@dataclass(frozen=True)
class KernelTrace:
    """The kernels of one run, by number of the forward pass and point.

    `forward_of` is the forward pass that computed each row, `step_of` the step. A pass that was
    recorded in a graph stands for many steps.
    """

    kernels: KernelsByPoint
    forward_of: tuple[int, ...]
    step_of: tuple[int, ...]

    def at(self, point: Point, row: int) -> tuple[KernelInfo, ...]:
        """Return the kernels of `point` in the pass of `row`.

        If several points end together, the first of them has all kernels.
        """
        forward = self.forward_of[row]
        points = [
            traced
            for number, traced in self.kernels
            if number == forward and traced.order <= point.order
        ]
        if not points:
            return ()
        return self.kernels[forward, max(points, key=lambda traced: traced.order)]


def kernels_of(forward_pass: ForwardPass, case: ReplayCase) -> KernelTrace:
    """Run `forward_pass` once under the profiler, and return its kernels.

    A pass that ran elsewhere has none to show.
    """
    tap = ProfilerTap(case.num_rows)
    if forward_pass.is_recorded:
        forward_pass.run(case, tap)
        return traced(tap, {})
    activities = supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    with profile(activities=activities, record_shapes=True) as profiler:
        forward_pass.run(case, tap)
    events = _trace_events(profiler)
    device = tap.forward_of.device
    hopper = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == HOPPER_MAJOR
    return traced(tap, kernels_between_marks(events, hopper))


def traced(tap: ProfilerTap, kernels: KernelsByPoint) -> KernelTrace:
    """Return the kernels, and what the tap of their pass noted."""
    forward_of, step_of = (
        tuple(numbers[:-1].tolist()) for numbers in (tap.forward_of, tap.step_of)
    )
    return KernelTrace(kernels, forward_of, step_of)


def _trace_events(profiler: profile) -> list[dict[str, Any]]:
    """Return the events of a profile, as its Chrome trace has them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return events


def kernels_between_marks(events: list[dict[str, Any]], hopper: bool = True) -> KernelsByPoint:
    """Return the kernels, or torch ops if there are none, that were started before each mark."""
    kernels: dict[tuple[int, Point], tuple[KernelInfo, ...]] = {}
    since_mark: list[str] = []
    for kind, name in _marks_and_work(_in_order_of_time(events)):
        if kind == "work":
            since_mark.append(name)
            continue
        _, forward, layer, op = name.split("|")
        if op and since_mark:
            forward_and_point = int(forward), Point(int(layer), op)
            kernels.setdefault(forward_and_point, _kernels_of_op(since_mark, hopper))
        since_mark = []
    return kernels


def _in_order_of_time(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events that have a time; of those that begin together, the longest is first."""
    return sorted(
        (event for event in events if "ts" in event and "cat" in event),
        key=lambda event: (event["ts"], -event.get("dur", 0)),
    )


def _kernels_of_op(names: list[str], hopper: bool) -> tuple[KernelInfo, ...]:
    """Return the kernels of one op, each once. Copies count only if there is nothing else.

    FlashAttention's splits follow from how often it ran, and from what ran after it.
    """
    names = [name for name in names if not _COPIES.search(name)] or names
    kernels = [identify(name, hopper) for name in names]
    if splits := _flash_splits(kernels, OUR_MERGE in names):
        kernels = [
            replace(kernel, splits=splits) if kernel.name == FLASH else kernel for kernel in kernels
        ]
    return tuple(dict.fromkeys(kernels))


def _flash_splits(kernels: list[KernelInfo], has_our_merge: bool) -> str:
    """Return how FlashAttention split the keys, or nothing if it did not."""
    num_flash = sum(kernel.name == FLASH for kernel in kernels)
    if any(kernel.name == FLASH_COMBINE for kernel in kernels):
        return "keys split"
    if num_flash > 1 or (num_flash and has_our_merge):
        launches = "launch" if num_flash == 1 else "launches"
        return f"ranges of keys in {num_flash} {launches}, merged"
    return ""


def _marks_and_work(timed: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield ("mark", its name) and ("work", the name of a kernel or op), in order of time."""
    on_gpu = _kernels_by_launch(timed)
    end_of_op = float("-inf")
    for event in timed:
        name = event["name"]
        if name.startswith(f"{MARK}|"):
            if event["cat"] == "user_annotation":
                yield "mark", name
        elif on_gpu:
            if kernel := _launched_kernel(event, on_gpu):
                yield "work", kernel["name"]
        elif event["ts"] >= end_of_op and _is_computing_op(event):
            end_of_op = event["ts"] + event.get("dur", 0)
            yield "work", _describe_op(event)


def _kernels_by_launch(events: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return the GPU kernels by the number that a kernel has in common with its launch."""
    return {event["args"].get("correlation"): event for event in events if event["cat"] == "kernel"}


def _launched_kernel(
    event: dict[str, Any], on_gpu: Mapping[Any, dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the kernel that `event` launches, if it is a launch.

    The kernels of a graph are those of its recording, which was marked.
    """
    if event["cat"] not in _LAUNCHES or "GraphLaunch" in event["name"]:
        return None
    return on_gpu.get(event["args"].get("correlation"))


def _is_computing_op(event: dict[str, Any]) -> bool:
    name = event["name"]
    return event["cat"] == "cpu_op" and "::" in name and not _MOVES.match(name)


def _describe_op(event: dict[str, Any]) -> str:
    """Return a torch op's name with the shapes of its first two inputs."""
    shapes = [
        shape
        for shape in event["args"].get("Input Dims", [])
        if shape and not isinstance(shape[0], list)
    ]
    return f"{event['name']} " + " × ".join(str(shape).replace(" ", "") for shape in shapes[:2])

"""Which kernel an op ran as: from a profile of one run, and from what a kernel's name and our
tables say.

On a GPU these are the kernels that were launched between two marks, on a CPU the outermost torch
ops, within functions of ours.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path as File
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from spmd_rl.kernels.linear.tiles import WGMMA_ROWS
from spmd_rl.microscope.replay.case import Case
from spmd_rl.microscope.replay.forward_pass import Path
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import MARK, Marks

HOPPER = 9  # its compute capability
# as a report calls it; our kernel that merges softmaxes
FLASH, MERGE = "FlashAttention-4", "_merge"
COMBINE = f"{FLASH} combine"  # its own, of as many parts as it was called with
_OURS = re.compile(
    r"(?P<kind>_|_ring_|shared_)matmul_(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)(x(?P<stages>\d+))?(?P<turned>_swap|_x_first)?"
)
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_FUNCTORS = re.compile(r"CUDAFunctor_(\w+)|(\w+)Functor<|(\w+?)_kernel_(?:cuda|impl)")
_COPIES = re.compile(
    r"FillFunctor|direct_copy_kernel|gather_kernel|index_(elementwise|copy|select)|CatArrayBatchedCopy"
)
_MOVES = re.compile(  # ops that move or make numbers and compute none
    r"aten::(view|reshape|empty\w*|as_strided|select|slice|narrow|t|transpose|permute|unsqueeze|squeeze|flatten|unflatten"
    r"|expand|contiguous|detach|alias|to|copy_|chunk|split|tensor_split|index_select|clone|resolve_\w+|lift_fresh|item|_unsafe_view"
    r"|index_copy_?|repeat_interleave|arange|zeros|ones|fill_|cat|pad|index|is_nonzero|new_\w+|constant_pad_nd|unbind"
    r"|resize_|zero_)$"
)


@dataclass(frozen=True)
class Kernel:
    """What is known of a kernel; empty where it is not. `splits`: of K, or of the keys."""

    name: str
    tile: str = ""
    splits: str = ""
    instruction: str = ""

    def __str__(self) -> str:
        known = ", ".join(part for part in (self.tile, self.splits, self.instruction) if part)
        return f"{self.name} ({known})" if known else self.name


Ran = Mapping[tuple[int, Point], tuple[Kernel, ...]]


@dataclass(frozen=True)
class Kernels:
    """The kernels of one path by forward pass and point; which pass computed each row, and in which
    step. A pass that was recorded stands for many steps."""

    ran: Ran
    forward_of: tuple[int, ...]
    step_of: tuple[int, ...]

    def at(self, point: Point, row: int) -> tuple[Kernel, ...]:
        """Those of `point` in the pass of `row`. Where several points end together, the first of
        them has all.
        """
        forward = self.forward_of[row]
        earlier = sorted(
            (seen for number, seen in self.ran if number == forward and seen.place <= point.place),
            key=lambda p: p.place,
        )
        return self.ran[forward, earlier[-1]] if earlier else ()


def kernels_of(path: Path, case: Case) -> Kernels:
    """Run `path` once under the profiler."""
    marks = Marks(case.num_rows)
    with profile(
        activities=supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA},
        record_shapes=True,
    ) as p:
        path.run(case, marks)
    with tempfile.TemporaryDirectory() as folder:
        file = File(folder) / "trace.json"
        p.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    forward_of, step_of = (
        tuple(numbers[:-1].tolist()) for numbers in (marks.forward_of, marks.step_of)
    )
    device = marks.forward_of.device
    hopper = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == HOPPER
    return Kernels(between_marks(events, hopper), forward_of, step_of)


def between_marks(events: list[dict[str, Any]], hopper: bool = True) -> Ran:
    """Kernels, or torch ops where there are none, by the mark that ends the stretch in which they
    were started.
    """
    timed = sorted(
        (one for one in events if "ts" in one and "cat" in one),
        key=lambda one: (one["ts"], -one.get("dur", 0)),
    )
    on_gpu = {one["args"].get("correlation"): one for one in timed if one["cat"] == "kernel"}
    found: dict[tuple[int, Point], tuple[Kernel, ...]] = {}
    stretch: list[str] = []
    for what, one in _marks_and_work(timed, on_gpu):
        if what == "work":
            stretch.append(one)
            continue
        _, forward, layer, op = one.split("|")
        if op and stretch:
            point = Point(int(layer), op)
            stretch = [name for name in stretch if not _COPIES.search(name)] or stretch
            found.setdefault((int(forward), point), _together(stretch, hopper))
        stretch = []
    return found


def _together(names: list[str], hopper: bool) -> tuple[Kernel, ...]:
    """The kernels of one op, each once. FlashAttention's splits are told by how often it ran, and
    by what follows.
    """
    kernels = [identify(name, hopper) for name in names]
    launches = sum(kernel.name == FLASH for kernel in kernels)
    if any(kernel.name == COMBINE for kernel in kernels):
        kernels = [
            replace(kernel, splits="keys split") if kernel.name == FLASH else kernel
            for kernel in kernels
        ]
    elif launches > 1 or (launches and MERGE in names):
        splits = f"ranges of keys in {launches} {'launch' if launches == 1 else 'launches'}, merged"
        kernels = [
            replace(kernel, splits=splits) if kernel.name == FLASH else kernel for kernel in kernels
        ]
    return tuple(dict.fromkeys(kernels))


def _marks_and_work(
    timed: list[dict[str, Any]], on_gpu: Mapping[Any, dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    until = float("-inf")
    for one in timed:
        if one["name"].startswith(f"{MARK}|"):
            if one["cat"] == "user_annotation":
                yield "mark", one["name"]
        elif on_gpu:
            # a replay is of what was marked
            launches = one["cat"] in _LAUNCHES and "GraphLaunch" not in one["name"]
            if launches and one["args"].get("correlation") in on_gpu:
                yield "work", on_gpu[one["args"]["correlation"]]["name"]
        elif (
            one["cat"] == "cpu_op"
            and one["ts"] >= until
            and "::" in one["name"]
            and not _MOVES.match(one["name"])
        ):
            until = one["ts"] + one.get("dur", 0)
            yield "work", _torch_op(one)


def _torch_op(event: dict[str, Any]) -> str:
    shapes = [
        shape
        for shape in event["args"].get("Input Dims", [])
        if shape and not isinstance(shape[0], list)
    ]
    return f"{event['name']} " + " × ".join(str(shape).replace(" ", "") for shape in shapes[:2])


def identify(name: str, hopper: bool = True) -> Kernel:
    """Read tile, splits and instruction out of a kernel's name, where it tells; some are only known
    on Hopper.
    """
    short = Kernel(_short(name))
    split = re.search(r"split_?k|stream_?k", name, re.IGNORECASE)
    splits = "" if split is None else "K split"
    if name.startswith("nvjet"):
        tile = re.search(r"_(\d+x\d+)_(\d+x\d+)_", name)
        return replace(
            short,
            tile=f"tile {tile[1]}" if tile else "",
            splits=splits or "one chain",
            instruction=_wide(name, hopper),
        )
    if "gemm" in name.lower() and (
        tile := re.search(r"tilesize(\d+x\d+x\d+)|(\d+x\d+_\d+x\d+)", name)
    ):
        instruction = _wide(name, "wgmma" in name) or "mma.sync"
        return replace(
            short, tile=f"tile {tile[1] or tile[2]}", splits=splits, instruction=instruction
        )
    if "splitkv" in name.lower():
        return replace(short, splits="keys split")
    if ours := _OURS.match(name):
        return _our_product(ours, hopper)
    if "flash" in name.lower() and ("cute" in name.lower() or name.startswith("kernel_cutlass")):
        merges = "combine" in name.lower()
        return (
            Kernel(COMBINE)
            if merges
            else Kernel(FLASH, "keys in blocks of 128", "one split", _wide(name, hopper))
        )
    return replace(short, splits=splits)


def _wide(name: str, hopper: bool) -> str:
    """The tensor cores' instruction of many rows: by the architecture in the kernel's name, or of
    the GPU.
    """
    if re.search(r"sm10\d", name):
        return "tcgen05"
    return "wgmma" if hopper or "sm90" in name else ""


def _short(name: str) -> str:
    """A template's name without its arguments, but with what an elementwise kernel does."""
    name = (
        name.replace("(anonymous namespace)::", "")
        .removeprefix("void ")
        .removeprefix("at::native::")
    )
    if re.fullmatch(r"_\w+", name):
        return f"Triton {name}"
    outer = re.split(r"[<(]", name)[0].strip()
    done = [
        part
        for found in _FUNCTORS.findall(name[len(outer) :])
        for part in found
        if part not in ("", "gpu", "Binary")
    ]
    return " ".join([outer, *done[:1]])[:96]


def _our_product(name: re.Match[str], hopper: bool) -> Kernel:
    """Those with stages are rings, which take the weight as wgmma's first operand, but for shares
    that are turned.
    """
    tile, wide = f"tile {name['m']}x{name['n']}x{name['k']}", _wide("", hopper)
    if name["stages"] is None:
        first, tall = (", weight first", name["n"]) if name["turned"] else ("", name["m"])
        return Kernel(
            "Triton _matmul",
            tile + first,
            "one chain",
            wide if int(tall) >= WGMMA_ROWS else "mma.sync",
        )
    made = "CuTe shared_matmul" if name["kind"] == "shared_" else "Triton _ring_matmul"
    first = "x first" if name["turned"] else "weight first"
    return Kernel(made, f"{name['stages']} stages of {tile}, {first}", "one chain", wide)

"""Replay of a role on as many ranks of this machine as share its work, beside that of one rank."""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from spmd_rl.cli.exit_code import run_guarded
from spmd_rl.cli.launcher import end_signals, launch
from spmd_rl.config.load import from_data
from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.role_context import Meshes, RoleContext
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.microscope.examine import ReplaySetup
from spmd_rl.microscope.ranks.part_tap import OwnPart, PartTap
from spmd_rl.microscope.ranks.ranks_pass import RanksPass
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.replay.forward_pass import ForwardPass
from spmd_rl.microscope.replay.weights import ReplayWeights
from spmd_rl.microscope.role_pass import forward_pass
from spmd_rl.model.parts.part import row_shards_of_run
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import ModelSpec

COMMAND = "mismatch"  # whose exit codes a rank that fails has
SIGNALLED = 128  # plus the signal: the exit code of a launcher that one ended
SHARED = ("cp", "tp", "ep")  # axes along which ranks of our roles share work
ROLES = {  # the split and the settings of each role, and the kind that has such ranks
    "engine": ("infer", ("engine",), "native"),
    "trainer": ("train", ("trainer", "backend"), "fsdp2"),
}


@contextmanager
def ready_to_fork() -> Iterator[None]:
    """Within, torch starts no threads: a process forked after it had some would wait for them."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@dataclass(frozen=True)
class SharedRole:
    """A role whose ranks share work, and the sizes of the axes along which they do."""

    side: str
    axes: dict[str, int]

    @classmethod
    def of(cls, settings: dict[str, Any], side: str) -> SharedRole | None:
        """Return the role of a run that `side` replays; None if its ranks share nothing, or if it
        is of another kind.
        """
        split, keys, kind = ROLES.get(side, ("", (), ""))
        table = settings
        for key in keys:
            table = table.get(key, {})
        if not split or table.get("kind", kind) != kind:
            return None
        sizes = settings.get("split", {}).get(split, {})
        axes = {axis: sizes[axis] for axis in SHARED if sizes.get(axis, 1) > 1}
        return cls(side, axes) if axes else None

    @property
    def num_ranks(self) -> int:
        """The fewest ranks with these axes; experts are shared by the ranks of all other axes."""
        others = math.prod(size for axis, size in self.axes.items() if axis != "ep")
        return math.lcm(others, self.axes.get("ep", 1))

    @property
    def name(self) -> str:
        return f"{self.side} on {self.num_ranks} ranks"

    def fits(self, device: torch.device) -> bool:
        """Return whether this machine has a device for each rank."""
        return device.type == "cpu" or torch.cuda.device_count() >= self.num_ranks


@dataclass(frozen=True)
class RankReplay:
    """A role's replay on its ranks. Each records its part; `beside` compares all with one rank."""

    role: SharedRole
    case: ReplayCase
    settings: dict[str, Any]
    weights: ReplayWeights
    dtype: torch.dtype
    device: torch.device
    folder: Path

    def record(self) -> bool:
        """Have ranks run the role's pass, and return whether they did; else, one said why not.

        They are forked, `ready_to_fork`. Blocks: until they end.
        """
        self.folder.mkdir()
        handlers = {number: signal.getsignal(number) for number in end_signals()}
        variables = dict(os.environ)
        try:
            code = launch(self.role.num_ranks, self._guarded, [COMMAND], 0, grace_s=0)
        finally:  # of this process, as it was
            logging.disable(logging.NOTSET)
            os.environ.clear()
            os.environ.update(variables)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if code > SIGNALLED:  # somebody ended the command
            raise SystemExit(code)
        return code == 0

    def beside(self, setup: ReplaySetup) -> ReplaySetup:
        """Return the comparison of one rank, and all: the setup's, but for its sides."""
        alone = self._pass(None)
        files = [self._file(rank) for rank in range(self.role.num_ranks)]
        ranks = RanksPass(self.role.name, files, self.case, alone)
        return replace(setup, left=alone, right=ranks, notes=(), doubt="", tolerance=None)

    @cached_property
    def _spec(self) -> ModelSpec:
        spec = read_spec(self.weights.folder)
        return replace(spec, row_shards=row_shards_of_run(self.settings))

    def _pass(self, context: RoleContext | None) -> ForwardPass:
        return forward_pass(
            self.role.side,
            self.weights.folder,
            self.dtype,
            self.device if context is None else context.device,
            self.settings,
            share_prompts=False,
            lora=self.weights.lora,
            context=context,
        )

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.safetensors"

    def _guarded(self, words: list[str]) -> int:
        return run_guarded(self._run_rank, words)

    def _run_rank(self, words: list[str]) -> int:
        """Be one of the ranks."""
        if self.device.type == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        context = self._joined()
        tap = PartTap(self.case.num_rows, self._spec, _part_of(context, self.role))
        self._pass(context).run(self.case, tap)
        tap.save(self._file(context.rank))
        torch.distributed.destroy_process_group()
        return 0

    def _joined(self) -> RoleContext:
        """Return the context of this rank in a world that the role has alone."""
        world = World.from_env()
        join(world, open_store(world))
        split, name = from_data(RoleSplit, self.role.axes), ROLES[self.role.side][0]
        placement = plan_split({name: split}, world.size)[name]
        meshes = Meshes(world)
        meshes.build([placement])
        return meshes.context(placement, self._spec.row_shards)


def _part_of(context: RoleContext, role: SharedRole) -> OwnPart:
    """Return what this rank has of each point."""

    def along(axis: str) -> tuple[int, int]:
        ranks = context.placement.ranks_along(context.world.rank, (axis,))
        return ranks.index(context.world.rank), size_of(context.placement.axes, axis)

    return OwnPart(along("tp"), along("cp"), cuts_rows=role.side != "engine")

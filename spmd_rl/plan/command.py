"""`spmd-rl plan`: print the plan of a run, and refuse one that does not fit."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from spmd_rl.controller.run.recipe import Invocation, load_recipe
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.split import Placement
from spmd_rl.offload.ledger import PHASES, Ledger, as_size
from spmd_rl.plan.resolve import RunPlan, resolve
from spmd_rl.plan.routes import Routes

MAX_ROWS = 8  # of a list; the rest is counted
MAX_RANKS = 8192  # what a push moves is computed for every pair of ranks


def main(words: list[str]) -> int:
    """Run `spmd-rl plan RECIPE [--world N] [--gpu-gib G] [--config F.toml] [--a.b=c ...]`.

    It takes the flags of `spmd-rl run` too: `--world` defaults to the ranks of this machine.
    Raises: PlanError when the split does not fit the world, or the memory the GPU.
    """
    options, rest = _parser().parse_known_args(words)
    capacity_bytes = _capacity_bytes(options.gpu_gib)
    invocation = _invocation(options, rest)
    cfg = load_recipe(options.recipe).configure(invocation)
    ranks_here: int = invocation.nproc or getattr(cfg, "nproc", 0) or 0
    world_size = _world_size(options.world, ranks_here)
    plan = resolve(cfg, world_size, capacity_bytes)
    print("\n".join(lines(plan)))
    if capacity_bytes is not None:
        plan.require(capacity_bytes)
        print(f"fits in {options.gpu_gib:g} GiB")
    return 0


def _invocation(options: argparse.Namespace, rest: list[str]) -> Invocation:
    """Return the `spmd-rl run` whose plan is asked for."""
    config = [f"--config={options.config}"] if options.config else []
    return Invocation.parse([options.recipe, *config, *rest])


def _capacity_bytes(gpu_gib: float | None) -> int | None:
    """Return the memory of one GPU in bytes, None where `--gpu-gib` is not given."""
    if gpu_gib is None:
        return None
    if not 0 < gpu_gib < math.inf:
        raise ConfigError(f"--gpu-gib={gpu_gib:g}: expected more than 0, and finite")
    return int(gpu_gib * 2**30)


def _world_size(asked: int | None, ranks_here: int) -> int:
    """Return the number of ranks. Raises: ConfigError unless it can be planned for."""
    world_size = ranks_here if asked is None else asked
    if not 1 <= world_size <= MAX_RANKS:
        raise ConfigError(
            f"a world of {world_size} ranks: set --world to a number from 1 to {MAX_RANKS}"
        )
    return world_size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spmd-rl plan",
        usage="spmd-rl plan RECIPE [--world N] [--gpu-gib G] [--config F.toml] [--a.b=c ...]",
        description="Print what a run would be, without a GPU or a rank: which ranks serve which "
        "role, the process groups, what a push of weights moves, and the memory of each role in "
        "each phase.",
        epilog="--a.b=c is any setting of the run: `spmd-rl run RECIPE --help` lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="as in `spmd-rl run`")
    parser.add_argument(
        "--world",
        type=int,
        metavar="N",
        help=f"number of ranks, up to {MAX_RANKS}; default: as --nproc N says",
    )
    parser.add_argument(
        "--gpu-gib",
        type=float,
        metavar="G",
        help="memory of one GPU; a run that needs more is refused",
    )
    parser.add_argument(
        "--config", type=Path, metavar="F.toml", help="settings of the run, as a file"
    )
    return parser


def lines(plan: RunPlan) -> Iterator[str]:
    """Yield the plan as text: split, groups, routes, memory."""
    yield from _split(plan)
    yield "process groups"
    groups = plan.groups
    yield from _first_rows(
        (f"  {name:12} ranks {_ranks_text(ranks)}" for name, ranks in groups), len(groups)
    )
    if plan.spec is None:
        return
    yield f"model        {plan.spec.family}, {plan.spec.num_parameters:,} parameters"
    yield from _routes(plan.routes)
    if plan.on_gpu:
        yield (
            "memory       planned as for GPUs: bfloat16, with CUDA contexts and "
            "NCCL's communicators"
        )
    yield from _memory(plan)


def _split(plan: RunPlan) -> Iterator[str]:
    yield f"world of {plan.world_size}"
    for placement in plan.placements.values():
        axes, ranks = _axes_text(placement), _ranks_text(placement.ranks)
        yield f"  {placement.name:8} {axes:28} ranks {ranks}"
    for role in plan.extra:
        if role.placement.name != role.name:
            ranks = _ranks_text(role.placement.ranks)
            yield f"  {role.name:8} {'with ' + role.placement.name:28} ranks {ranks}"
    if idle := plan.idle:
        yield f"  {'idle':8} {'no role':28} ranks {_ranks_text(idle)}"


def _routes(routes: Routes) -> Iterator[str]:
    if routes:
        within, between = as_size(routes.within_bytes), as_size(routes.between_bytes)
        yield f"weight push  {within} within ranks, {between} between ranks"
        rows = (
            f"  rank {source:>3} -> {target:<3} {as_size(routes[source, target])}"
            for source, target in routes
        )
        yield from _first_rows(rows, len(routes))


def _memory(plan: RunPlan) -> Iterator[str]:
    for roles, rank in plan.peak_ranks().items():
        yield from _table(f"memory of {' + '.join(roles)}, most on rank {rank}", plan.ledgers[rank])


def _table(title: str, ledger: Ledger) -> Iterator[str]:
    yield f"{title:42}" + "".join(f"{phase:>12}" for phase in PHASES)
    for entry in filter(lambda entry: entry.num_bytes, ledger.entries):
        cells = "".join(
            f"{as_size(entry.num_bytes) if phase in entry.phases else '-':>12}" for phase in PHASES
        )
        yield f"  {entry.tag:40}{cells}"
    yield f"  {'all':40}" + "".join(
        f"{as_size(ledger.resident_bytes(phase)):>12}" for phase in PHASES
    )


def _axes_text(placement: Placement) -> str:
    """Return how the ranks of a role hold its model; those of an engine have whole copies."""
    if placement.name == "infer":
        return f"{placement.size} whole {'copies' if placement.size > 1 else 'copy'}"
    return " x ".join(f"{axis} {size}" for axis, size in placement.axes.items())


def _ranks_text(ranks: tuple[int, ...]) -> str:
    consecutive = ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return (
        f"{ranks[0]}-{ranks[-1]}" if consecutive and len(ranks) > 2 else ", ".join(map(str, ranks))
    )


def _first_rows(rows: Iterator[str], num_rows: int) -> Iterator[str]:
    """Yield the first rows, and how many more there are."""
    yield from islice(rows, MAX_ROWS)
    if num_rows > MAX_ROWS:
        yield f"  ... and {num_rows - MAX_ROWS} more"

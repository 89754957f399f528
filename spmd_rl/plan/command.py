"""Prints a plan, and refuses one that cannot fit."""

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
from spmd_rl.plan.resolve import Resolved, resolve
from spmd_rl.plan.routes import Routes

MANY = 8
MOST_RANKS = 8192  # what a push moves is counted for every pair of them


def main(words: list[str]) -> int:
    """`spmd-rl plan RECIPE [--world N] [--gpu-gib G] [--config F.toml] [--a.b=c ...]`.

    The words of `spmd-rl run` do too: where no world is given, it is the ranks of this machine.

    Raises: PlanError when the split does not fit the world, or the memory the GPU.
    """
    options, rest = _parser().parse_known_args(words)
    if options.gpu_gib is not None and not 0 < options.gpu_gib < math.inf:
        raise ConfigError(f"--gpu-gib={options.gpu_gib:g}: expected more than 0, and finite")
    config = [f"--config={options.config}"] if options.config else []
    invocation = Invocation.parse([options.recipe, *config, *rest])
    cfg = load_recipe(options.recipe).configure(invocation)
    here: int = invocation.nproc or getattr(cfg, "nproc", 0) or 0
    world = here if options.world is None else options.world
    if not 1 <= world <= MOST_RANKS:
        raise ConfigError(f"a world of {world} ranks: say --world N, of 1 to {MOST_RANKS}")
    capacity_bytes = None if options.gpu_gib is None else int(options.gpu_gib * 2**30)
    resolved = resolve(cfg, world, capacity_bytes)
    print("\n".join(lines(resolved)))
    if capacity_bytes is not None:
        resolved.require(capacity_bytes)
        print(f"fits in {options.gpu_gib:g} GiB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spmd-rl plan",
        usage="spmd-rl plan RECIPE [--world N] [--gpu-gib G] [--config F.toml] [--a.b=c ...]",
        description="Print what a run would be, without a GPU or a rank: which ranks serve which role, the process "
        "groups, what a push of weights moves, and the memory of each role, phase by phase.",
        epilog="--a.b=c is any setting of the run: `spmd-rl run RECIPE --help` lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="as in `spmd-rl run`")
    parser.add_argument(
        "--world",
        type=int,
        metavar="N",
        help=f"number of ranks, up to {MOST_RANKS}; default: as --nproc N says",
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


def lines(resolved: Resolved) -> Iterator[str]:
    """The plan as text: split, groups, routes, memory."""
    yield f"world of {resolved.world_size}"
    for placement in resolved.placements.values():
        yield f"  {placement.name:8} {_held(placement):28} ranks {_ranks(placement.ranks)}"
    if idle := resolved.idle:
        yield f"  {'idle':8} {'no role':28} ranks {_ranks(idle)}"
    yield "process groups"
    groups = resolved.groups
    yield from _first((f"  {name:12} ranks {_ranks(ranks)}" for name, ranks in groups), len(groups))
    if resolved.spec is None:
        return
    yield f"model        {resolved.spec.family}, {resolved.spec.num_parameters:,} parameters"
    yield from _routes(resolved.routes)
    if resolved.on_gpu:
        yield "memory       planned as for GPUs: bfloat16, with CUDA contexts and NCCL's communicators"
    yield from _memory(resolved)


def _routes(routes: Routes) -> Iterator[str]:
    if routes:
        yield f"weight push  {as_size(routes.within_bytes)} within ranks, {as_size(routes.between_bytes)} between ranks"
        rows = (
            f"  rank {source:>3} -> {target:<3} {as_size(routes[source, target])}"
            for source, target in routes
        )
        yield from _first(rows, len(routes))


def _memory(resolved: Resolved) -> Iterator[str]:
    for roles, rank in resolved.peak_ranks().items():
        yield from _table(
            f"memory of {' + '.join(roles)}, most on rank {rank}", resolved.ledgers[rank]
        )


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


def _held(placement: Placement) -> str:
    """How the ranks of a role hold its model; an engine's are not cut along any axis."""
    if placement.name == "infer":
        return f"{placement.size} whole {'copies' if placement.size > 1 else 'copy'}"
    return " x ".join(f"{axis} {size}" for axis, size in placement.axes.items())


def _ranks(ranks: tuple[int, ...]) -> str:
    consecutive = ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return (
        f"{ranks[0]}-{ranks[-1]}" if consecutive and len(ranks) > 2 else ", ".join(map(str, ranks))
    )


def _first(rows: Iterator[str], num_rows: int) -> Iterator[str]:
    """The first rows, and how many there are beyond them."""
    yield from islice(rows, MANY)
    if num_rows > MANY:
        yield f"  ... and {num_rows - MANY} more"

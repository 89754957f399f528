"""Prints a plan, and refuses one that cannot fit."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from spmd_rl.controller.recipe import Invocation, load_recipe
from spmd_rl.errors import ConfigError
from spmd_rl.offload.ledger import PHASES, gib
from spmd_rl.plan.resolve import Resolved, resolve
from spmd_rl.plan.routes import Routes

MANY = 8
MOST_RANKS = 8192  # what a push moves is counted for every pair of them


def main(words: list[str]) -> int:
    """`spmd-rl plan RECIPE --world N [--gpu-gib G] [--config F.toml] [--a.b=c ...]`.

    Raises: PlanError when the split does not fit the world, or the memory the GPU.
    """
    parser = argparse.ArgumentParser(prog="spmd-rl plan", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("recipe")
    parser.add_argument("--world", type=int, required=True, help="number of ranks")
    parser.add_argument("--gpu-gib", type=float, help="memory of one device; more than that is refused")
    parser.add_argument("--config", type=Path)
    options, rest = parser.parse_known_args(words)
    if not 1 <= options.world <= MOST_RANKS:
        raise ConfigError(f"--world={options.world}: expected 1 to {MOST_RANKS}")
    if options.gpu_gib is not None and not 0 < options.gpu_gib < math.inf:
        raise ConfigError(f"--gpu-gib={options.gpu_gib:g}: expected more than 0, and finite")
    config = [f"--config={options.config}"] if options.config else []
    invocation = Invocation.parse([options.recipe, *config, *rest])
    capacity_bytes = None if options.gpu_gib is None else int(options.gpu_gib * 2**30)
    resolved = resolve(load_recipe(options.recipe).configure(invocation), options.world, capacity_bytes)
    print("\n".join(lines(resolved)))
    if capacity_bytes is not None:
        resolved.require(capacity_bytes)
        print(f"fits in {options.gpu_gib:g} GiB")
    return 0


def lines(resolved: Resolved) -> Iterator[str]:
    """The plan as text: split, groups, routes, memory."""
    yield f"world of {resolved.world_size}"
    for place in resolved.placements.values():
        axes = " x ".join(f"{axis} {size}" for axis, size in place.axes.items())
        yield f"  {place.name:8} {axes:28} ranks {_ranks(place.ranks)}"
    yield "process groups"
    groups = resolved.groups
    yield from _first((f"  {name:12} ranks {_ranks(ranks)}" for name, ranks in groups), len(groups))
    if resolved.spec is None:
        return
    yield f"model        {resolved.spec.family}, {resolved.spec.num_parameters:,} parameters"
    yield from _routes(resolved.routes)
    yield from _memory(resolved)


def _routes(routes: Routes) -> Iterator[str]:
    if routes:
        yield f"weight push  {gib(routes.within_bytes)} within ranks, {gib(routes.between_bytes)} between ranks"
        rows = (f"  rank {source:>3} -> {target:<3} {gib(routes[source, target])}" for source, target in routes)
        yield from _first(rows, len(routes))


def _memory(resolved: Resolved) -> Iterator[str]:
    rank = resolved.peak_rank()
    ledger = resolved.ledgers[rank]
    yield f"{f'memory of rank {rank}, which needs most':42}" + "".join(f"{phase:>12}" for phase in PHASES)
    for entry in filter(lambda entry: entry.num_bytes, ledger.entries):
        cells = "".join(f"{gib(entry.num_bytes) if phase in entry.phases else '-':>12}" for phase in PHASES)
        yield f"  {entry.tag:40}{cells}"
    yield f"  {'all':40}" + "".join(f"{gib(ledger.resident_bytes(phase)):>12}" for phase in PHASES)


def _ranks(ranks: tuple[int, ...]) -> str:
    consecutive = ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if consecutive and len(ranks) > 2 else ", ".join(map(str, ranks))


def _first(rows: Iterator[str], num_rows: int) -> Iterator[str]:
    """The first rows, and how many there are beyond them."""
    yield from islice(rows, MANY)
    if num_rows > MANY:
        yield f"  ... and {num_rows - MANY} more"

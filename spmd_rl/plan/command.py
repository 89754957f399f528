"""`spmd-rl plan`: print the plan of a run, and refuse one that does not fit."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import MISSING, fields, replace
from functools import cache, partial
from pathlib import Path

from spmd_rl.config.load import leaves, read_toml
from spmd_rl.config.schema import default_of
from spmd_rl.controller.run.recipe import Invocation, Recipe, load_recipe
from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.plan import combinations, tp_choice
from spmd_rl.plan import fewest_gpus as fewest
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.plan.resolve import GPUS_PER_HOST, RunPlan, resolve
from spmd_rl.plan.savings import Flags, costs, key_of
from spmd_rl.plan.text import lines

MAX_RANKS = 8192
DATA = ("data", "recorded")  # required settings that only a run reads
GIB = 1 << 30
# by the number of GB that a GPU is sold by: what CUDA reports of an H100 and of an H200
USABLE_GIB = {80.0: 79.1, 141.0: 139.8}


def main(words: list[str]) -> int:
    """Run `spmd-rl plan --combinations`, which lists settings that do not go together, or
    `spmd-rl plan RECIPE [--world N] [--gpu-gib G] [--host-gib H] [--fewest-gpus]
    [--config F.toml] [--a.b=c ...]`.

    It takes the flags of `spmd-rl run` too: `--world` defaults to the ranks of this machine.
    Raises: PlanError when the split does not fit the world, or the memory the GPU or the host.
    """
    if "--combinations" in words:
        print("\n".join(combinations.lines(combinations.sections())))
        return 0
    options, rest = _parser().parse_known_args(words)
    gpu_bytes = _num_bytes("--gpu-gib", options.gpu_gib)
    host_bytes = _num_bytes("--host-gib", options.host_gib)
    recipe = load_recipe(options.recipe)
    invocation = _without_data(recipe, _invocation(options, rest))
    cfg = recipe.configure(invocation)
    ranks_here: int = invocation.nproc or RunNeeds.of(cfg).nproc or 0
    room = fewest.Room(gpu_bytes or 0, host_bytes, ranks_here or GPUS_PER_HOST)
    configure = cache(partial(_configure, recipe, invocation))
    search = fewest.Search(configure, _kept(invocation), room, _report)
    if options.fewest_gpus:
        return _print_fewest(search, options.world)
    world_size = _world_size(options.world, ranks_here)
    plan = resolve(cfg, world_size, gpu_bytes, ranks_per_host=room.ranks_per_host)
    print("\n".join(lines(plan)))
    if gpu_bytes is None:
        return _require_host(plan, room)
    _print_tp(search, (), plan)
    try:
        plan.require(gpu_bytes)
    except PlanError as error:
        raise PlanError(f"{error}; {_advice(search, world_size)}") from None
    print(f"fits in {options.gpu_gib:g} GiB{_sold_as(options.gpu_gib)}")
    return _require_host(plan, room)


def _require_host(plan: RunPlan, room: fewest.Room) -> int:
    """Say that the memory of a host suffices, if it is known. Raises: PlanError if it does not."""
    if room.host_bytes is not None:
        plan.require_host(room.host_bytes, min(plan.world_size, room.ranks_per_host))
        print(f"fits in {room.host_bytes / GIB:g} GiB of each host")
    return 0


def _print_fewest(search: fewest.Search, world_size: int | None) -> int:
    """Print the least number of GPUs for a run, or the settings for `world_size`, and the plan.

    Raises: PlanError if no number suffices.
    """
    if not search.room.gpu_bytes:
        raise ConfigError("--fewest-gpus needs --gpu-gib G, the memory of one GPU")
    worlds = fewest.WORLDS if world_size is None else (_world_size(world_size, 0),)
    tried = search.fewest(worlds)
    _report("")
    print("\n".join(fewest.lines(tried)))
    best = tried[-1]
    if best.why_not or best.plan is None:
        raise PlanError(fewest.why_none(tried, search.room))
    if best.lacks_pages:
        print(f"{'':12}{best.plan.queue}")
        more = search.without_waiting(best, worlds)
        _report("")
        if more:
            print("\n".join(fewest.suffices(more, "no sequence waits")))
    if note := _sold_as(search.room.gpu_bytes / GIB):
        print(f"{'':12}counted for GPUs of {search.room.gpu_bytes / GIB:g} GiB{note}")
    print("\n".join(["", *lines(best.plan)]))
    _print_tp(search, best.flags, best.plan)
    return 0


def _print_tp(search: fewest.Search, flags: Flags, plan: RunPlan) -> None:
    """Print the floors of a rollout's time by tp, and the best of them, where they are known."""
    choice = tp_choice.tp_choice(search.configure, flags, plan, search.room.gpu_bytes)
    if choice is not None:
        print("\n".join(tp_choice.lines(choice)))


def _advice(search: fewest.Search, world_size: int) -> str:
    """Return the end of a sentence about a run that does not fit: the settings that help."""
    found = search.best(world_size)
    _report("")
    if not found.why_not:
        return f"it fits with {' '.join(found.flags)}, which costs: {costs(found.flags)}"
    return "no settings of the plan save enough: --fewest-gpus finds how many GPUs do"


def _report(text: str) -> None:
    """Show on a terminal what a search tries, in place of what was shown before."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\r", file=sys.stderr, flush=True)


def _sold_as(gib: float) -> str:
    """Return what is usable of a GPU, where its size seems to be the one that it is sold by."""
    usable = USABLE_GIB.get(gib)
    return f"; a GPU that is sold as {gib:g} GB has {usable} GiB for CUDA" if usable else ""


def _configure(recipe: Recipe, invocation: Invocation, flags: tuple[str, ...]) -> object:
    words = [flag.removeprefix("--") for flag in flags]
    return recipe.configure(replace(invocation, overrides=[*invocation.overrides, *words]))


def _kept(invocation: Invocation) -> set[str]:
    """Return the settings that a run has set itself, in its file or on the command line."""
    in_file = read_toml(invocation.file) if invocation.file else {}
    return {*leaves(in_file), *map(key_of, invocation.overrides)}


def _invocation(options: argparse.Namespace, rest: list[str]) -> Invocation:
    """Return the `spmd-rl run` whose plan is asked for."""
    config = [f"--config={options.config}"] if options.config else []
    return Invocation.parse([options.recipe, *config, *rest])


def _without_data(recipe: Recipe, invocation: Invocation) -> Invocation:
    """Return the invocation with no data where it names none: a plan does not read what it is."""
    given = {key.partition(".")[0] for key in _kept(invocation)}
    required = {field.name for field in fields(recipe.config) if default_of(field) is MISSING}
    left = [f"{name}=" for name in DATA if name in required - given]
    return replace(invocation, overrides=[*invocation.overrides, *left])


def _num_bytes(flag: str, gib: float | None) -> int | None:
    """Return a size in bytes, None where the flag is not given."""
    if gib is None:
        return None
    if not 0 < gib < math.inf:
        raise ConfigError(f"{flag}={gib:g}: expected more than 0, and finite")
    return int(gib * GIB)


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
        usage="spmd-rl plan RECIPE [--world N] [--gpu-gib G] [--host-gib H] [--fewest-gpus] "
        "[--config F.toml] [--a.b=c ...], or spmd-rl plan --combinations",
        description="Print what a run would be, without a GPU or a rank: which ranks serve which "
        "role, the process groups, what a push of weights moves, and the memory of each role in "
        "each phase.",
        epilog="--combinations lists which settings do not go together. --a.b=c is any setting of "
        "the run: `spmd-rl run RECIPE --help` lists them.",
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
        help="memory of one GPU, such as 79.1 for one of 80 GB; a run that needs more is refused",
    )
    parser.add_argument(
        "--host-gib",
        type=float,
        metavar="H",
        help="memory of one host for what its ranks keep there; a run that needs more is refused",
    )
    parser.add_argument(
        "--fewest-gpus",
        action="store_true",
        help="find the least number of GPUs of --gpu-gib for this run, and the flags that save "
        "memory; with --world N, the flags for N GPUs",
    )
    parser.add_argument(
        "--config", type=Path, metavar="F.toml", help="settings of the run, as a file"
    )
    return parser

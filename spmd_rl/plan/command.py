"""`spmd-rl plan`: print the plan of a run, and refuse one that does not fit."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmd_rl.controller.run.recipe import Invocation, load_recipe
from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.plan import fewest_gpus as fewest
from spmd_rl.plan.resolve import resolve
from spmd_rl.plan.text import lines

MAX_RANKS = 8192  # what a push moves is computed for every pair of ranks


def main(words: list[str]) -> int:
    """Run `spmd-rl plan RECIPE [--world N] [--gpu-gib G] [--host-gib H] [--fewest-gpus]
    [--config F.toml] [--a.b=c ...]`.

    It takes the flags of `spmd-rl run` too: `--world` defaults to the ranks of this machine.
    Raises: PlanError when the split does not fit the world, or the memory the GPU or the host.
    """
    options, rest = _parser().parse_known_args(words)
    gpu_bytes = _num_bytes("--gpu-gib", options.gpu_gib)
    host_bytes = _num_bytes("--host-gib", options.host_gib)
    invocation = _invocation(options, rest)
    if options.fewest_gpus:
        return _print_fewest(invocation, gpu_bytes, host_bytes)
    cfg = load_recipe(options.recipe).configure(invocation)
    ranks_here: int = invocation.nproc or getattr(cfg, "nproc", 0) or 0
    world_size = _world_size(options.world, ranks_here)
    plan = resolve(cfg, world_size, gpu_bytes)
    print("\n".join(lines(plan)))
    if gpu_bytes is not None:
        plan.require(gpu_bytes)
        print(f"fits in {options.gpu_gib:g} GiB")
    if host_bytes is not None:
        plan.require_host(host_bytes, min(world_size, ranks_here or fewest.GPUS_PER_HOST))
        print(f"fits in {options.host_gib:g} GiB of each host")
    return 0


def _print_fewest(invocation: Invocation, gpu_bytes: int | None, host_bytes: int | None) -> int:
    """Print the least number of GPUs for a run, and its plan.

    Raises: PlanError if no number suffices.
    """
    if gpu_bytes is None:
        raise ConfigError("--fewest-gpus needs --gpu-gib G, the memory of one GPU")
    recipe = load_recipe(invocation.recipe)

    def configure(flags: tuple[str, ...]) -> Any:
        words = [flag.removeprefix("--") for flag in flags]
        return recipe.configure(replace(invocation, overrides=[*invocation.overrides, *words]))

    kept = {word.partition("=")[0] for word in invocation.overrides}
    room = fewest.Room(gpu_bytes, host_bytes, invocation.nproc or fewest.GPUS_PER_HOST)
    tried = fewest.fewest_gpus(configure, fewest.attempts(kept), room)
    print("\n".join(fewest.lines(tried)))
    if tried[-1].why_not:
        raise PlanError(fewest.why_none(tried, room))
    print("\n".join(["", *lines(tried[-1].plan)]))
    return 0


def _invocation(options: argparse.Namespace, rest: list[str]) -> Invocation:
    """Return the `spmd-rl run` whose plan is asked for."""
    config = [f"--config={options.config}"] if options.config else []
    return Invocation.parse([options.recipe, *config, *rest])


def _num_bytes(flag: str, gib: float | None) -> int | None:
    """Return a size in bytes, None where the flag is not given."""
    if gib is None:
        return None
    if not 0 < gib < math.inf:
        raise ConfigError(f"{flag}={gib:g}: expected more than 0, and finite")
    return int(gib * 2**30)


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
        "[--config F.toml] [--a.b=c ...]",
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
        "--host-gib",
        type=float,
        metavar="H",
        help="memory of one host for what its ranks keep there; a run that needs more is refused",
    )
    parser.add_argument(
        "--fewest-gpus",
        action="store_true",
        help="find the least number of GPUs of --gpu-gib for this run, and the flags that save "
        "memory",
    )
    parser.add_argument(
        "--config", type=Path, metavar="F.toml", help="settings of the run, as a file"
    )
    return parser

"""`spmd-rl run`: check the config of a run, then launch its ranks on this machine."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from spmd_rl.cli import rank
from spmd_rl.cli.help import HELP_FLAGS, of_recipe, of_run
from spmd_rl.cli.launcher import end_signals, launch
from spmd_rl.config.combinations import refuse
from spmd_rl.config.dump import dump_toml
from spmd_rl.config.run import RunConfig
from spmd_rl.controller.lifecycle.shutdown import end_process
from spmd_rl.controller.lifecycle.stack_server import show
from spmd_rl.controller.run.recipe import Invocation, load_recipe, run_config
from spmd_rl.mesh.split import plan_split
from spmd_rl.observe.provenance import record_start_time
from spmd_rl.observe.run_folder import RunFolder
from spmd_rl.observe.run_lock import launcher_lock, refuse_running_run
from spmd_rl.plan.axes import check_axes
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.rollout.kinds import kind_of
from spmd_rl.train.packages import check_packages


def main(words: list[str]) -> int:
    """Run the recipe that `words` name, or print help where they ask for it or name none."""
    if words and not HELP_FLAGS & set(words):
        return launch_run(words)
    names_recipe = bool(words) and not words[0].startswith("-")
    text = of_recipe(words[0], words) if names_recipe else of_run()
    print(text, file=sys.stdout if words else sys.stderr)
    return 0 if words else 2


def launch_run(words: list[str]) -> int:
    """Check the config here, where a mistake costs nothing, then launch the ranks.

    Blocks: until the run has ended.
    """
    record_start_time()
    for number in end_signals():
        signal.signal(number, _end_before_launch)
    rank.raise_open_file_limit()
    invocation = Invocation.parse(words)
    cfg = load_recipe(invocation.recipe).accept(invocation)
    needs, run = RunNeeds.of(cfg), run_config(cfg)
    num_ranks = _num_ranks(invocation, needs)
    for trainer in filter(None, (needs.trainer, needs.critic)):
        check_packages(trainer)
    _check_bits(needs)
    _make_run_folder(cfg, run)
    signal.signal(signal.SIGQUIT, lambda *_: show(run.path))
    with launcher_lock(run.path):
        return launch(
            num_ranks, rank.run_rank, ["run", *words], invocation.max_restarts, run.grace_s
        )


def _num_ranks(invocation: Invocation, needs: RunNeeds) -> int:
    """Return how many ranks to start; 0 means one for each GPU.

    Raises: PlanError when the recipe's roles cannot share that many.
    """
    num_ranks = invocation.nproc or needs.nproc or 0
    if num_ranks and needs.split is not None:
        check_axes(needs, plan_split(needs.split, num_ranks))
    return num_ranks


def _check_bits(needs: RunNeeds) -> None:
    """Raises: ConfigError for a trainer and an engine that have other bits on this host."""
    trainer, engine = needs.trainer, needs.engine
    if needs.run.exact and needs.pushes and engine is not None and trainer is not None:
        settings = {"engine": engine, "trainer": trainer, "host": {"dtype": _dtype_of_host()}}
        refuse(kind_of(engine).refused, settings)


def _dtype_of_host() -> str:
    """Return the dtype that "auto" means on this host."""
    import torch

    return "bfloat16" if torch.cuda.device_count() else "float32"


def _make_run_folder(cfg: object, run: RunConfig) -> None:
    """Make the run's folder. Raises: ConfigError if another run or another config uses it."""
    folder = RunFolder(run.path)
    folder.check_reusable(dump_toml(cfg), run.resume)
    refuse_running_run(run.path)
    folder.make()


def _end_before_launch(number: int, frame: FrameType | None) -> None:
    """End at once: nothing has started yet, and an import could swallow an exception."""
    end_process(f"the run was ended by {signal.Signals(number).name} before it began", 128 + number)

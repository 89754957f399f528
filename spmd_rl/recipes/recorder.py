"""What a run leaves behind: the controller's account of steps and phases, written to the run folder and the screen."""

from __future__ import annotations

import sys
import tomllib
from functools import partial
from itertools import chain
from typing import Any

from spmd_rl.algo.metrics import group_metrics, is_flat
from spmd_rl.config import dump_toml
from spmd_rl.controller.config import RunConfig
from spmd_rl.controller.steps import Step
from spmd_rl.errors import SpmdError
from spmd_rl.mesh.split import plan_split
from spmd_rl.observe.observer import Observer
from spmd_rl.observe.run import RunFolder, has_content
from spmd_rl.observe.sinks import Sinks
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.types import Group

FLAT_STEPS = 3  # the first ones, without a difference in reward, are told
LEAVES = ("report.html", "curves.png", "metrics.jsonl", "samples", "checkpoints", "hf")


class Recorder:
    """The controller's observer. Recipes log `groups` (a list of Group) and metrics (dicts), in any order."""

    def __init__(self, run: RunConfig, cfg: Any, world_size: int) -> None:
        """Raises: ConfigError when the run's folder holds another run; PlanError when the split does not fit."""
        config = dump_toml(cfg)
        resolved = _resolved(cfg, world_size)
        self._folder = RunFolder.open(run.path, config, resolved, resume=run.resume)
        for note in resolved["notes"]:
            print(note, flush=True)
        self._sinks = Sinks(run.sinks, run.path, tomllib.loads(config))
        self._observer: Observer | None = None
        self._steps_left = 0
        self._num_flat: int | None = 0  # None: not counted any more
        self._logged: dict[int, tuple[list[Group], dict[str, float]]] = {}

    def on_steps(self, start: int, num_steps: int) -> None:
        self._folder.drop_samples(after=start)
        self._steps_left = num_steps - start
        if self._steps_left <= 0 < num_steps:
            print(f"all {num_steps} steps are done: more of them, with --run.resume=true, go on from here", flush=True)
        self._observer = Observer(self._folder, num_steps, sinks=self._sinks, resume_at=start)

    def on_phase(self, name: str, seconds: float | None) -> None:
        if self._observer is not None:
            self._observer.on_phase(name, seconds)
        elif seconds is None and name not in ("sleep", "wake"):  # before the first step nothing else is shown
            print(f"{name} ...", flush=True)

    def on_log(self, step: Step, what: tuple[Any, ...]) -> None:
        groups, metrics = self._logged.setdefault(step.index, ([], {}))
        for item in what:
            if isinstance(item, dict):
                metrics.update(item)
            elif isinstance(item, (list, tuple)) and all(isinstance(one, Group) for one in item):
                groups.extend(item)
            else:
                shown = f"{item!r:.80} ({type(item).__name__})"
                raise SpmdError(f"step.log takes lists of groups and dicts of metrics, not {shown}")

    def on_step(self, step: Step) -> None:
        groups, metrics = self._logged.pop(step.index, ([], {}))
        self._steps_left -= 1
        if self._observer is not None:
            full = metrics | {"perf/controller_share": step.controller_share}
            self._observer.on_step(step.index + 1, full, groups, partial(self._account, groups, step.index))

    def _account(self, groups: list[Group], version: int) -> dict[str, float]:
        """What the groups of the step that learned from them say of it; on stderr what it goes on without."""
        for reason in chain(*Group.to_columns(groups).skipped):
            print(f"step {version + 1} goes on without a sample: {reason}", file=sys.stderr, flush=True)
        if groups and self._num_flat is not None:
            self._num_flat = self._num_flat + 1 if is_flat(groups) else None
            if self._num_flat == FLAT_STEPS:
                alike = f"{FLAT_STEPS} steps in which all samples of every prompt had the same reward"
                why = "group advantages are 0, and nothing is learned"
                print(f"{alike}: {why} ({self._folder.path / 'samples'} shows them)", file=sys.stderr, flush=True)
        return group_metrics(groups, version)

    def catch_up(self) -> None:
        if self._observer is not None:
            self._observer.catch_up()

    def leave_screen(self) -> None:
        if self._observer is not None:
            self._observer.leave_screen()

    def close(self) -> None:
        """Draw the last curves and give the terminal back, also after a run that failed; of a whole one, say where."""
        if self._observer is not None:
            self._observer.close()
            if self._steps_left <= 0:
                there = [name for name in LEAVES if has_content(self._folder.path / name)]
                print(f"{self._folder.path} holds {', '.join(there)}", flush=True)
        else:
            self._sinks.close()


def _resolved(cfg: Any, world_size: int) -> dict[str, Any]:
    """The plan of the run as plain data: which ranks serve which role, on which axes, and what is to be known of it."""
    split = getattr(cfg, "split", None)
    roles = {} if split is None else plan_split(split, world_size)
    return {
        "world_size": world_size,
        "roles": {name: {"ranks": list(place.ranks), "axes": place.axes} for name, place in roles.items()},
        "notes": _notes(cfg),
    }


def _notes(cfg: Any) -> list[str]:
    """What is not as it seems in a run of this config, a sentence each."""
    sampling = getattr(cfg, "sampling", None)
    truncation = sampling.truncation if isinstance(sampling, SamplingConfig) else {}
    return [
        f"sampling.{name} = {value} keeps tokens from being drawn: training takes each sample as drawn from all "
        "tokens, and the count of mismatched tokens does not show the difference"
        for name, value in truncation.items()
    ]

"""What a run leaves behind: the controller's account of steps and phases, written to the run folder
and the screen.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from spmd_rl.algo.group_metrics import group_metrics, rewards_are_equal
from spmd_rl.config.dump import dump_toml
from spmd_rl.config.run import RunConfig
from spmd_rl.controller.run.steps import LoopStep
from spmd_rl.errors import SpmdError
from spmd_rl.mesh.split import plan_split
from spmd_rl.model.spec import ModelSpec
from spmd_rl.observe.atomic_write import write_atomically
from spmd_rl.observe.provenance import PROVENANCE_FILE, provenance, start_unix_s
from spmd_rl.observe.run_folder import RunFolder, has_content
from spmd_rl.observe.sinks import Sinks
from spmd_rl.report.reward_warnings import RewardWarnings
from spmd_rl.report.run_monitor import RunMonitor
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.types.samples import Group

LEAVES = ("report.html", "curves.png", "metrics.jsonl", "samples", "checkpoints", "hf")


class Recorder:
    """The controller's observer. Recipes log `groups` (a list of Group) and metrics (dicts), in any
    order.
    """

    def __init__(
        self, run: RunConfig, cfg: Any, world_size: int, words: Sequence[str] = ()
    ) -> None:
        """`words` are those after `spmd-rl run`.

        Raises: ConfigError when the run's folder holds another run; PlanError when the split does
        not fit.
        """
        config = dump_toml(cfg)
        resolved = _resolved(cfg, world_size)
        self._folder = RunFolder.open(run.path, config, resolved, resume=run.resume)
        for note in resolved["notes"]:
            print(note, flush=True)
        settings = tomllib.loads(config)
        self._began_s = start_unix_s()
        facts = provenance(words, self._began_s) | _parameters(cfg)
        write_atomically(run.path / PROVENANCE_FILE, json.dumps(facts, indent=1) + "\n")
        self._sinks = Sinks(run.sinks, run.path, settings)
        self._reward_watch = RewardWarnings(settings, self._folder.path / "samples")
        self._observer: RunMonitor | None = None
        # seconds of the phases that ended before there was an observer
        self._before_s: dict[str, float] = {}
        self._phase: str | None = None  # which was under way then
        self._steps_left = 1  # or more: `on_steps` says how many
        self._logged: dict[int, tuple[list[Group], dict[str, float]]] = {}

    def on_warmup(self, num_steps: int) -> None:
        self._observer = self._observe(0)
        self._observer.begin_warmup(num_steps)
        if self._phase is not None:
            self._observer.on_phase(self._phase)

    def on_steps(self, start: int, num_steps: int) -> None:
        self._folder.drop_samples(after=start)
        self._steps_left = num_steps - start
        if self._steps_left <= 0 < num_steps:
            print(
                f"all {num_steps} steps are done: more of them, with --run.resume=true, go on from here",
                flush=True,
            )
        self._observer = self._observer or self._observe(start)
        self._observer.begin_steps(num_steps)

    def _observe(self, start: int) -> RunMonitor:
        return RunMonitor(
            self._folder,
            sinks=self._sinks,
            resume_at=start,
            began_unix_s=self._began_s,
            before_s=self._before_s,
        )

    def on_phase(self, name: str, seconds: float | None) -> None:
        if self._observer is not None:
            self._observer.on_phase(name, seconds)
        elif seconds is not None:
            self._before_s[name], self._phase = self._before_s.get(name, 0.0) + seconds, None
        elif name not in ("sleep", "wake"):  # before the first step nothing else is shown
            self._phase = name
            print(f"{name} ...", flush=True)

    def on_log(self, step: LoopStep, what: tuple[Any, ...]) -> None:
        groups, metrics = self._logged.setdefault(step.index, ([], {}))
        for item in what:
            if isinstance(item, dict):
                metrics.update(item)
            elif isinstance(item, (list, tuple)) and all(isinstance(one, Group) for one in item):
                groups.extend(item)
            else:
                shown = f"{item!r:.80} ({type(item).__name__})"
                raise SpmdError(f"step.log takes lists of groups and dicts of metrics, not {shown}")

    def on_step(self, step: LoopStep) -> None:
        groups, metrics = self._logged.pop(step.index, ([], {}))
        if step.index >= 0:
            self._steps_left -= 1
            metrics["perf/controller_share"] = step.controller_share
        if self._observer is not None:
            self._observer.on_step(
                step.index + 1, metrics, groups, partial(self._account, groups, step.index)
            )

    def _account(self, groups: list[Group], version: int) -> dict[str, float]:
        """What the groups of the step that learned from them say of it; on stderr what it goes on
        without.
        """
        for reason in chain(*Group.to_columns(groups).skipped):
            print(
                f"step {version + 1} goes on without a sample: {reason}",
                file=sys.stderr,
                flush=True,
            )
        metrics = group_metrics(groups, version)
        if "reward/mean" in metrics:
            for hint in self._reward_watch.take(metrics["reward/mean"], rewards_are_equal(groups)):
                print(hint, file=sys.stderr, flush=True)
        return metrics

    def catch_up(self) -> None:
        if self._observer is not None:
            self._observer.catch_up()

    def leave_screen(self) -> None:
        if self._observer is not None:
            self._observer.leave_screen()

    def close(self) -> None:
        """Draw the last curves and give the terminal back, also after a run that failed; of a whole
        one, say where.
        """
        if self._observer is not None:
            self._observer.close()
            if self._steps_left <= 0:
                there = [name for name in LEAVES if has_content(self._folder.path / name)]
                print(f"{self._folder.path} holds {', '.join(there)}", flush=True)
        else:
            self._sinks.close()


def _parameters(cfg: Any) -> dict[str, int]:
    """How many the model has, where the config names one that can be read here."""
    model = getattr(cfg, "model", None)
    if not isinstance(model, str):
        return {}
    try:
        return {"parameters": ModelSpec.from_folder(model).num_parameters}
    except SpmdError:
        return {}


def _resolved(cfg: Any, world_size: int) -> dict[str, Any]:
    """The plan of the run as plain data: which ranks serve which role, on which axes, and what is
    to be known of it.
    """
    split = getattr(cfg, "split", None)
    roles = {} if split is None else plan_split(split, world_size)
    return {
        "world_size": world_size,
        "roles": {
            name: {"ranks": list(placement.ranks), "axes": placement.axes}
            for name, placement in roles.items()
        },
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

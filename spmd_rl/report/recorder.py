"""Recorder of a run: what the controller reports of steps and phases goes to folder and screen."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from spmd_rl.algo.group_metrics import group_metrics, rewards_are_equal
from spmd_rl.config.defaults import changed_defaults
from spmd_rl.config.dump import dump_toml
from spmd_rl.config.run import RunConfig
from spmd_rl.controller.run.steps import LoopStep, RunObserver
from spmd_rl.errors import SpmdError
from spmd_rl.mesh.split import plan_split
from spmd_rl.model.read import read_spec
from spmd_rl.observe.atomic_write import write_atomically
from spmd_rl.observe.provenance import PROVENANCE_FILE, provenance, start_unix_s
from spmd_rl.observe.run_folder import RunFolder, has_content
from spmd_rl.observe.sinks import Sinks
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.report.run_monitor import RunMonitor
from spmd_rl.report.verdicts.reward_warnings import RewardWarnings
from spmd_rl.train.cost.parts import num_trained_parameters
from spmd_rl.types.failures import told_causes
from spmd_rl.types.groups import Group
from spmd_rl.types.samples import error_of

RESULTS = (
    "report.html",
    "curves.png",
    "metrics.jsonl",
    "samples",
    "eval.json",
    "checkpoints",
    "hf",
)


class Recorder(RunObserver):
    """The controller's observer. Recipes log lists of groups and dicts of metrics, in any order."""

    def __init__(
        self, run: RunConfig, cfg: object, world_size: int, words: Sequence[str] = ()
    ) -> None:
        """Open the run's folder. `words` are the arguments after `spmd-rl run`.

        Raises: ConfigError when the folder holds another run; PlanError when the split does not
        fit the world.
        """
        config, needs = dump_toml(cfg), RunNeeds.of(cfg)
        resolved = _resolved(needs, world_size)
        self._folder = RunFolder.open(run.path, config, resolved, resume=run.resume)
        for note in resolved["notes"]:
            print(note, flush=True)
        settings = tomllib.loads(config)
        self._start_unix_s = start_unix_s()
        facts = provenance(words, self._start_unix_s) | _parameters(needs)
        self._facts = facts | {"defaults": changed_defaults(cfg)}
        self._write_facts()
        self._sinks = Sinks(run.sinks, run.path, settings)
        self._trains = needs.trainer is not None
        self._reward_warnings = RewardWarnings(settings, self._folder.path / "samples")
        self._monitor: RunMonitor | None = None
        # before there is a monitor: seconds of finished phases, and the current phase
        self._before_s: dict[str, float] = {}
        self._phase: str | None = None
        self._steps_left = 1  # until `on_steps` says how many
        self._early_end = ""  # why the run ends before its last step
        self._logged: dict[int, tuple[list[Group], dict[str, float]]] = {}

    def on_warmup(self, num_steps: int) -> None:
        self._monitor = self._open_monitor(0)
        self._monitor.begin_warmup(num_steps)
        if self._phase is not None:
            self._monitor.on_phase(self._phase)

    def on_steps(self, start: int, num_steps: int) -> None:
        self._folder.drop_samples(after=start)
        self._steps_left = num_steps - start
        if self._steps_left <= 0 < num_steps:
            print(
                f"all {num_steps} steps are done: to go on, set more steps",
                flush=True,
            )
        self._monitor = self._monitor or self._open_monitor(start)
        self._monitor.begin_steps(num_steps)

    def _open_monitor(self, start: int) -> RunMonitor:
        return RunMonitor(
            self._folder,
            sinks=self._sinks,
            resume_at=start,
            start_unix_s=self._start_unix_s,
            before_s=self._before_s,
        )

    def on_phase(self, name: str, seconds: float | None) -> None:
        if self._monitor is not None:
            self._monitor.on_phase(name, seconds)
        elif seconds is not None:
            self._before_s[name], self._phase = self._before_s.get(name, 0.0) + seconds, None
        elif name not in ("sleep", "wake"):  # before the first step there is no view
            self._phase = name
            print(f"{name} ...", flush=True)

    def on_log(self, step: LoopStep, items: tuple[Any, ...]) -> None:
        groups, metrics = self._logged.setdefault(step.index, ([], {}))
        for item in items:
            if isinstance(item, dict):
                metrics.update(item)
            elif isinstance(item, (list, tuple)) and all(
                isinstance(group, Group) for group in item
            ):
                groups.extend(item)
            else:
                preview = f"{item!r:.80} ({type(item).__name__})"
                raise SpmdError(
                    f"step.log takes lists of groups and dicts of metrics, not {preview}"
                )

    def on_step(self, step: LoopStep) -> None:
        groups, metrics = self._logged.pop(step.index, ([], {}))
        metrics = step.measured | metrics
        if step.index >= 0:
            self._steps_left -= 1
            metrics["perf/controller_share"] = step.controller_share
        if self._monitor is not None:
            self._monitor.on_step(
                step.index + 1, metrics, groups, partial(self._group_metrics, groups, step.index)
            )

    def on_evaluation(
        self, num_steps: int, metrics: Mapping[str, float], groups: Mapping[str, list[Group]]
    ) -> None:
        """Write an evaluation's metrics and samples. Causes of failures are printed to stderr."""
        for name, own in groups.items():
            _tell_failures(f"the evaluation of {name} after {num_steps} steps", own)
        if self._monitor is not None:
            self._monitor.on_evaluation(num_steps, metrics, groups)

    def _group_metrics(self, groups: list[Group], version: int) -> dict[str, float]:
        """Return the metrics of a step's groups.

        Causes of failed samples, and warnings about rewards, are printed to stderr.
        """
        _tell_failures(f"step {version + 1}", groups)
        metrics = group_metrics(groups, version if self._trains else None)
        if "reward/mean" in metrics:
            for warning in self._reward_warnings.after_step(
                metrics["reward/mean"], rewards_are_equal(groups)
            ):
                print(warning, file=sys.stderr, flush=True)
        return metrics

    def on_counts(self, counts: Mapping[str, int]) -> None:
        if self._monitor is not None:
            self._monitor.on_counts(counts)

    def on_early_end(self, sentence: str) -> None:
        self._steps_left, self._early_end = 0, sentence
        self._facts["early_end"] = sentence
        self._write_facts()

    def _write_facts(self) -> None:
        text = json.dumps(self._facts, indent=1) + "\n"
        write_atomically(self._folder.path / PROVENANCE_FILE, text)

    def catch_up(self) -> None:
        if self._monitor is not None:
            self._monitor.catch_up()

    def leave_screen(self) -> None:
        if self._monitor is not None:
            self._monitor.leave_screen()

    def close(self) -> None:
        """Close the monitor, and after a finished run print where its results are.

        This is also called after a run has failed.
        """
        if self._monitor is not None:
            self._monitor.close()
            if self._steps_left <= 0:
                for text in filter(None, (self._early_end, self._monitor.closing_text())):
                    print(text, flush=True)
                results = [name for name in RESULTS if has_content(self._folder.path / name)]
                print(f"{self._folder.path} holds {', '.join(results)}", flush=True)
        else:
            self._sinks.close()


def _parameters(needs: RunNeeds) -> dict[str, int]:
    """Return the numbers of parameters of the run's model, if it can be read here.

    The number of those that are trained is there if not all are.
    """
    trainer = needs.trainer
    if not needs.model:
        return {}
    try:
        spec = read_spec(needs.model)
        found = {"parameters": spec.num_parameters}
        if trainer is not None and (trainer.lora.rank or trainer.freeze):
            found["trained_parameters"] = num_trained_parameters(spec, trainer)
    except SpmdError:
        return {}
    return found


def _resolved(needs: RunNeeds, world_size: int) -> dict[str, Any]:
    """Return the plan of the run as plain data: ranks and axes of each role, and notes."""
    roles = {} if needs.split is None else plan_split(needs.split, world_size)
    return {
        "world_size": world_size,
        "roles": {
            name: {"ranks": list(placement.ranks), "axes": placement.axes}
            for name, placement in roles.items()
        },
        "notes": _notes(needs),
    }


def _notes(needs: RunNeeds) -> list[str]:
    """Return a sentence for each setting that may surprise."""
    sampling, engine = needs.sampling, needs.engine
    if sampling is None:
        return []
    if engine is not None and not engine.returns_kept_sets:
        remedy = 'engine.kind = "native" returns the tokens that were left'
    elif sampling.replays:
        return []
    else:
        remedy = "sampling.replay_filters = true trains over the tokens that were left"
    return [
        f"sampling.{name} = {value} excludes tokens from sampling, but training treats each sample "
        "as drawn from all tokens, and the count of mismatched tokens does not show this: " + remedy
        for name, value in sampling.truncation.items()
    ]


def _tell_failures(where: str, groups: Sequence[Group]) -> None:
    """Print why samples have failed: a line for each cause."""
    failed = [sample for group in groups for sample in group.failed]
    for line in told_causes(map(error_of, failed)):
        print(f"{where} goes on without {line}", file=sys.stderr, flush=True)

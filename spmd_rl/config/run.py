"""What every run has, whatever its recipe; a recipe's `Config` carries it as the field `run`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.config.rules import at_least, require
from spmd_rl.errors import ConfigError
from spmd_rl.observe.sinks import check_sinks

# a rank says that it lives once a second, half a second late where its main thread computes
LEAST_S = {
    "deadline_s": 0.1,
    "between_calls_s": 0.1,
    "lost_after_s": 2.0,
    "start_s": 0.1,
    "grace_s": 0.0,
}
LEAST = {"seed": 0, "save_every": 0, "keep_checkpoints": 1, "keep_best": 0}


@dataclass(frozen=True)
class RunConfig:
    """Name, seed and patience of a run."""

    name: str = ""  # of the run, and of its folder; "" stands for the recipe's name
    folder: str = "runs"  # where the folders of runs are
    # of the tokens that are drawn; the order of data has prompts.seed, random weights trainer.seed
    seed: int = 0
    # refuse a role's ranks, or a trainer and an engine, whose numeric contracts differ
    exact: bool = True
    deadline_s: float = 600.0  # how long one call may take, unless the call says otherwise
    between_calls_s: float = 1800.0  # how long the recipe's own code may take between two calls
    lost_after_s: float = 20.0  # a rank silent for this long is lost
    start_s: float = 300.0  # how long all ranks may take to report
    grace_s: float = 25.0  # after SIGTERM, how long the step and its checkpoint may still take
    resume: bool = False  # go on in the folder of a run whose configuration was another
    save_every: int = 20  # steps between checkpoints; 0 saves once, after the last step
    keep_checkpoints: int = 2  # how many of the newest stay
    keep_best: int = 1  # how many more stay because of their reward
    sinks: tuple[str, ...] = ()  # where metrics go beside metrics.jsonl: "tensorboard", "wandb"
    trace: bool = True  # record what every process does when, in traces/ of the run's folder

    def __post_init__(self) -> None:
        at_least(self, LEAST | LEAST_S)
        if self.seed >= 1 << 63:
            raise ConfigError(f"seed = {self.seed}: expected less than 2^63")
        if math.isinf(self.grace_s):
            raise ConfigError("grace_s = inf: expected a number of seconds that ends")
        is_plain = not {"/", "\\", "\0"} & set(self.name) and self.name not in (".", "..")
        require(
            is_plain, "name", self.name, "the name of a folder in run.folder, without a separator"
        )
        check_sinks(self.sinks)

    @property
    def traces(self) -> Path | None:
        """Where processes record their spans."""
        return (self.path / "traces").absolute() if self.trace else None

    @property
    def path(self) -> Path:
        """The run's folder; that of a recipe whose config has no `run` is called "run"."""
        return Path(self.folder) / (self.name or "run")

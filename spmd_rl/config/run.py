"""Settings that every run has; a recipe's `Config` carries them as the field `run`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.config.combinations import OFF, ON, Combination, refuse
from spmd_rl.config.rules import at_least, require
from spmd_rl.observe.sinks import check_sinks

# least values; a rank reports once a second, and up to half a second late while it computes
LEAST_S = {
    "deadline_s": 0.1,
    "between_calls_s": 0.1,
    "lost_after_s": 2.0,
    "start_s": 0.1,
    "grace_s": 0.0,
}
LEAST_COUNTS = {
    "seed": 0,
    "verify_every": 0,
    "save_every": 0,
    "keep_checkpoints": 1,
    "keep_best": 0,
    "patience": 0,
}
REFUSED = (
    Combination({"patience": ON, "best": OFF}, "{0}: expected 0, unless run.best names a metric"),
)


@dataclass(frozen=True)
class RunConfig:
    """Name, seed, deadlines and checkpoints of a run."""

    name: str = ""  # of the run, and of its folder; "" stands for the recipe's name
    folder: str = "runs"  # where the folders of runs are
    # of the samples; the order of data has prompts.seed, random weights trainer.seed
    seed: int = 0
    # refuse ranks of a role, or a trainer and an engine, whose numeric contracts differ
    exact: bool = True
    # in how many parts products that ranks share are summed: 2, 4 or 8, and no fewer than tp, so
    # that runs with another tp have the same bits; 0: as many as the largest tp
    row_shards: int = 0
    # compare the engine's weights with the trainer's at every n-th push; 0: never
    verify_every: int = 1
    # at the first push, see that this comparison finds one wrong bit
    self_check: bool = True
    deadline_s: float = 600.0  # how long one call may take, unless the call says otherwise
    between_calls_s: float = 1800.0  # how long the recipe's own code may take between two calls
    lost_after_s: float = 20.0  # a rank silent for this long is lost
    start_s: float = 300.0  # how long all ranks may take to report
    # after SIGTERM or a first Ctrl-C, how long the step and its checkpoint may still take
    grace_s: float = 25.0
    resume: bool = False  # go on in a run's folder though its settings have changed
    save_every: int = 20  # steps between checkpoints; 0: none between
    save_last: bool = True  # save after the last step too, whatever save_every is
    keep_checkpoints: int = 2  # how many of the newest are kept
    keep_best: int = 1  # how many more are kept because of their reward, or of `best`
    # by which metric of an evaluation the best checkpoint goes, such as "eval/NAME/reward"; "": by
    # the reward of the step before it
    best: str = ""
    patience: int = 0  # evaluations without a better `best` after which the run ends; 0: none
    sinks: tuple[str, ...] = ()  # where metrics go too: "tensorboard", "wandb"
    trace: bool = True  # record what every process does when, in traces/ of the run's folder

    def __post_init__(self) -> None:
        at_least(self, LEAST_COUNTS | LEAST_S)
        require(self.seed < 1 << 63, "seed", self.seed, "less than 2^63")
        fits = self.row_shards in (0, 1, 2, 4, 8)
        require(fits, "row_shards", self.row_shards, "0, 1, 2, 4 or 8")
        require(math.isfinite(self.grace_s), "grace_s", self.grace_s, "a finite number of seconds")
        is_plain = not {"/", "\\", "\0"} & set(self.name) and self.name not in (".", "..")
        expected = "the name of a folder in run.folder, without a separator"
        require(is_plain, "name", self.name, expected)
        is_metric = not self.best or self.best.startswith("eval/")
        require(is_metric, "best", self.best, "a metric of an evaluation, such as eval/NAME/reward")
        refuse(REFUSED, self)
        check_sinks(self.sinks)

    @property
    def traces(self) -> Path | None:
        """The folder for the spans of all processes, if they are recorded."""
        return (self.path / "traces").absolute() if self.trace else None

    @property
    def path(self) -> Path:
        """The run's folder; that of a recipe whose config has no `run` is called "run"."""
        return Path(self.folder) / (self.name or "run")

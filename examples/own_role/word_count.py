"""A role of your own: it counts words, each rank its share of the lines.

spmd-rl run examples/own_role/word_count.py --nproc 2 --text "to be or not to be"
"""

from dataclasses import dataclass, field

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.capabilities import Contracted
from spmd_rl.controller.controller import Controller
from spmd_rl.controller.endpoint import Role, Sharded, collective
from spmd_rl.mesh.split import RoleSplit


class WordCount(Role, Contracted):
    """Counts words. The base class `Contracted` says that it has a numeric contract."""

    @collective
    def count(self, lines: Sharded[list[str]]) -> Sharded[list[int]]:
        """Return the number of words of each line."""
        return [len(line.split()) for line in lines]

    @collective
    def share(self) -> str:
        """Return the same value on every rank, as an endpoint must that is not Sharded."""
        return f"{self.context.size} ranks"

    def numeric_contract(self) -> dict[str, str | int]:
        """Return what the counts depend on, which must be the same on every rank."""
        return {"words end at": "white space"}


@dataclass(frozen=True)
class Config:
    text: str = "the quick brown fox"  # whose words are counted
    run: RunConfig = field(default_factory=RunConfig)


def main(ctl: Controller, cfg: Config) -> None:
    roles = ctl.world.split({"counter": RoleSplit()})
    counter = ctl.spawn(WordCount, cfg, on=roles.counter)
    lines = cfg.text.split(". ")
    print(counter.count.call(lines), "on", counter.share.call(), flush=True)

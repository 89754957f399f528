"""A `Run` that starts sooner where nobody disturbs it."""

from __future__ import annotations

import os

from tests.dist.forked_controller import forking
from tests.dist.launched import Launched
from tests.dist.recipes.conftest import UNDRAWN
from tests.system.kill_resume import COMMAND, Outcome, Run


class ForkedRun(Run):
    """One command in one folder. It is forked from a process that has imported torch.

    A start that a test disturbs is a new command, whose processes have a mark in their environment.
    """

    def environment(self) -> dict[str, str]:
        """Return the environment that the run starts with, in which it draws no curves."""
        found = super().environment()
        return found | {"PYTHONPATH": os.pathsep.join([str(UNDRAWN), found["PYTHONPATH"]])}

    def finish(self) -> Outcome:
        if self.command != COMMAND:
            return super().finish()
        words = ["run", *self.words, f"--run.name={self.name}"]
        process = Launched(words, self.cwd, self.environment(), forking)
        try:
            self.output = "".join(process.communicate(self.limit_s))
        finally:
            process.end()
        assert process.returncode == 0, self.output
        return Outcome.of(self.folder)

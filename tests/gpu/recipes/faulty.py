"""The shipped recipe `grpo` with an engine whose middle layer sums K in two parts; the trainer's
does not.
"""

from __future__ import annotations

from functools import update_wrapper
from typing import Any, cast
from unittest.mock import patch

import spmd_rl as rl
from spmd_rl.recipes import grpo, policy_run
from spmd_rl.recipes.grpo import Config, check

__all__ = ["Config", "Faulty", "check", "main"]


class Faulty(rl.Rollout):
    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        from spmd_rl.microscope.diagnose.faults import split_k

        split_k(cast(Any, self.engine))  # it asks for no more than a model


update_wrapper(Faulty.__init__, rl.Rollout.__init__)  # a recipe finds the settings of an engine


def main(ctl: rl.Controller, cfg: Config) -> None:
    with patch.object(policy_run, "Rollout", Faulty):
        grpo.main(ctl, cfg)

"""What the ledger counts beside an engine's pages reaches the ranks, and no file of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spmd_rl.config.load import load
from spmd_rl.plan.resolve import resolve
from spmd_rl.recipes.grpo import Config
from tests.dist.recipes.conftest import EXAMPLE

pytestmark = pytest.mark.dist

TOLD = """
import spmd_rl as rl
from spmd_rl.recipes.grpo import Config

class Told(rl.Role):
    def __init__(
        self, cfg: rl.NativeEngineConfig, context: rl.RoleContext, reserved_bytes: int = 0
    ) -> None:
        super().__init__(cfg, context)
        self.reserved_bytes = reserved_bytes

    @rl.collective
    def reserved(self) -> int:
        return self.reserved_bytes

def main(ctl, cfg):
    told = ctl.spawn(Told, cfg.engine, on=ctl.world.split(cfg.split).infer)
    (ctl.run_folder / "told").write_text(str(told.reserved.call()))
"""


def test_an_engine_is_told_what_is_beside_it(run: Any, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(TOLD)
    counted = resolve(
        load(Config, None, [f"model={EXAMPLE / 'model'}", "data=none.jsonl"]), 2
    ).reserved_bytes()
    for _ in range(2):  # the second run takes the folder of the first for one of the same config
        ended = run("told.py", nproc=2)
        assert ended.code == 0, ended.sentence
        assert int((ended.folder / "told").read_text()) == counted > 0
    assert "reserved_bytes" not in (ended.folder / "config.toml").read_text()
    given = run("told.py", "--engine.num_pages=9", nproc=2, name="given")
    assert (given.code, (given.folder / "told").read_text()) == (0, "0")

"""Steps of a run: what happens when the recipe has returned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.run.step_loop import StepLoop


class Cursor:
    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


class Closing(Cursor):
    closed_at: int | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def close(self) -> None:
        self.closed_at = len(list(self.folder.glob("**/checkpoints/step_*/state.json")))


def test_parts_are_closed_once_the_last_checkpoint_is_there(tmp_path: Path) -> None:
    dispatcher: Any = SimpleNamespace(
        final_message=SimpleNamespace(),
        calls=SimpleNamespace(waited_s=0.0),
        termination=SimpleNamespace(error=None, grace_s=0.0),
        trace=SimpleNamespace(add=lambda *_, **__: None, flush=lambda: None),
    )
    loop = StepLoop(RunConfig(folder=str(tmp_path), save_every=0), dispatcher, None, lambda _: None)
    part = Closing(tmp_path)
    start = loop.resume({"cursor": Cursor(), "sampler": part})
    for step in loop.steps(9, start):
        if step.index == 1:
            break
    assert part.closed_at is None
    loop.close()
    assert part.closed_at == 1

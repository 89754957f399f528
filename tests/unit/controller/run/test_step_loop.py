"""Steps of a run: what happens when the recipe has returned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.run.step_loop import StepLoop
from spmd_rl.controller.run.steps import LoopStep


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


class Observer:
    """What a step loop reports, as far as these tests look at it."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.sentences: list[str] = []

    def on_steps(self, start: int, num_steps: int) -> None: ...

    def on_phase(self, name: str, seconds: float | None) -> None: ...

    def on_step(self, step: LoopStep) -> None:
        self.steps.append(step.index)

    def on_early_end(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def catch_up(self) -> None: ...


def step_loop(folder: Path, observer: Any = None, **settings: Any) -> StepLoop:
    dispatcher: Any = SimpleNamespace(
        final_message=SimpleNamespace(),
        calls=SimpleNamespace(waited_s=0.0),
        termination=SimpleNamespace(error=None, grace_s=0.0),
        trace=SimpleNamespace(add=lambda *_, **__: None, flush=lambda: None),
    )
    run = RunConfig(folder=str(folder), **{"save_every": 0, **settings})
    return StepLoop(run, dispatcher, observer, lambda _: None)


def saved(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("**/checkpoints/step_*/state.json"))


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("save_every", [0, 2])
def test_a_step_that_ends_the_run_is_no_step(tmp_path: Path, leaves: bool, save_every: int) -> None:
    """Whether the recipe goes on to the next step or leaves its loop, and started again too."""
    for start in (0, 2):
        observer = Observer()
        loop = step_loop(tmp_path, observer, save_every=save_every)
        assert loop.resume({"cursor": Cursor()}) == start
        for step in loop.steps(9, start):
            if step.index == 2:
                step.end_run("nothing is left")
                if leaves:
                    break
        loop.close()
        assert observer.steps == [*range(start, 2)]
        assert observer.sentences == ["nothing is left: the run ends after step 2"]
        assert loop.num_done == 2
        assert saved(tmp_path) == ["step_000002"]


@pytest.mark.parametrize("ends", ["all steps", "early", "left"])
@pytest.mark.parametrize(("save_every", "kept"), [(0, []), (2, ["step_000002"])])
def test_a_run_may_end_without_a_last_checkpoint(
    tmp_path: Path, ends: str, save_every: int, kept: list[str]
) -> None:
    loop = step_loop(tmp_path, Observer(), save_every=save_every, save_last=False)
    for step in loop.steps(3, loop.resume({"cursor": Cursor()})):
        if step.index == 2 and ends == "left":
            break
        if step.index == 2 and ends == "early":
            step.end_run("nothing is left")
    loop.close()
    assert saved(tmp_path) == kept


def test_a_checkpoint_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    files = []
    for _ in range(2):
        loop = step_loop(tmp_path)
        for step in loop.steps(9, loop.resume({"cursor": Cursor()})):
            if step.index == 1:
                step.end_run("nothing is left")
        loop.close()
        (file,) = tmp_path.glob("**/checkpoints/step_*/state.json")
        files.append(file.stat().st_ino)
    assert files[0] == files[1]


def test_parts_are_closed_once_the_last_checkpoint_is_there(tmp_path: Path) -> None:
    loop = step_loop(tmp_path)
    part = Closing(tmp_path)
    start = loop.resume({"cursor": Cursor(), "sampler": part})
    for step in loop.steps(9, start):
        if step.index == 1:
            break
    assert part.closed_at is None
    loop.close()
    assert part.closed_at == 1

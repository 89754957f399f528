"""Whatever is wrong with the input, a run ends with one clear sentence and a non-zero exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.controller.run.command import rewind

pytestmark = pytest.mark.dist

EXAMPLE = Path(__file__).parents[3] / "examples/arithmetic"


def test_refused_before_anything_starts(run: Any) -> None:
    """More of them are in tests/unit/check/test_refused_runs.py, without a process."""
    ended = run("grpo", "--stpes=3")
    assert ended.code == 2
    assert "the nearest known key is 'steps'" in ended.sentence
    assert not ended.folder.exists()


def test_reward_that_raises_shows_the_sample(run: Any, tmp_path: Path) -> None:
    reward = tmp_path / "bad_reward.py"
    reward.write_text(
        "def grade(prompt, sample):\n    return 1 / (len(sample.tokens) - len(sample.tokens))\n"
    )
    ended = run("grpo", f"--reward={reward}:grade")
    assert ended.code == 2
    assert "ZeroDivisionError" in ended.sentence
    assert "response" in ended.sentence
    assert "prompt '" in ended.sentence


def test_loss_that_is_not_finite(run: Any) -> None:
    """A learning rate beyond all measure makes the next step's log-probs NaN."""
    words = (
        f"--model={EXAMPLE / 'model'}",
        f"--data={EXAMPLE / 'train.jsonl'}",
        "--trainer.init=random",
    )
    ended = run(
        "sft", *words, "--trainer.lr=1e30", "--trainer.clip_norm=0", "--steps=5", small=False
    )
    assert ended.code == 1
    assert re.search(
        r"train step 1: the (loss|gradient) is not finite on rank 0; that optimizer step",
        ended.sentence,
    )


def test_folder_of_another_run(run: Any) -> None:
    assert run("grpo", "--steps=1").code == 0
    ended = run("grpo", "--steps=1", "--trainer.lr=5e-4")
    assert ended.code == 2
    assert "holds a run with another configuration (trainer.lr was" in ended.sentence


def test_a_checkpoint_whose_bytes_changed(run: Any) -> None:
    """One bit of a weight would be a number like any other; the reader of shards does not look."""
    words = ("--run.save_every=1", "--run.resume=true")
    ended = run("grpo", "--steps=2", *words)
    (shard,) = ended.folder.glob("checkpoints/step_000002/trainer/weights-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    ended = run("grpo", "--steps=3", *words)
    assert ended.code == 1
    assert re.search(
        r"safetensors is not as it was written.*`spmd-rl rewind runs/r 1` and the same command",
        ended.sentence,
    )
    rewind(ended.folder / "checkpoints", "1")
    assert run("grpo", "--steps=3", *words).code == 0


def test_two_numeric_contracts(run: Any) -> None:
    """A bfloat16 engine cannot have the bits of a float32 trainer; it may be asked for all the
    same.
    """
    allowed = run(
        "grpo", "--steps=1", "--engine.dtype=bfloat16", "--run.exact=false", name="allowed"
    )
    assert allowed.code == 0, allowed.sentence
    assert allowed.metrics[0]["onpolicy/mismatched_tokens"] > 0


ODD = """
from dataclasses import dataclass, field

import spmd_rl as rl

@dataclass(frozen=True)
class Config:
    run: rl.RunConfig = field(default_factory=rl.RunConfig)

class Odd(rl.Role):
    def numeric_contract(self) -> dict[str, str | int]:
        return {"threads": 4 + self.context.rank}

def main(ctl, cfg):
    ctl.spawn(Odd, cfg, on=ctl.world.split({"odd": rl.RoleSplit()}).odd)
"""


def test_ranks_of_one_role_that_follow_two_contracts(run: Any, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    refused = run("odd.py", nproc=2, small=False, name="refused")
    assert refused.code == 1
    said = (
        "odd on rank 0 and odd on rank 1 follow different numeric contracts: "
        "threads is 4 in the first and 5 in the second"
    )
    assert said in refused.sentence
    allowed = run("odd.py", "--run.exact=false", nproc=2, small=False, name="allowed")
    assert allowed.code == 0, allowed.sentence
    assert len(json.loads((allowed.folder / "contract.json").read_text())["odd"]) == 2

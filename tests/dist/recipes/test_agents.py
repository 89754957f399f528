"""Runs whose agents hang, crash or are cut: what is learned, and what is counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.recipes.conftest import REPO, Ended

pytestmark = pytest.mark.dist
AGENTS = Path(__file__).with_name("agents.py")
EXAMPLE = REPO / "examples/environments"
COMMAND = f"{sys.executable} {AGENTS} {{task_file}}"


def trained(run: Any, tmp_path: Path, kind: str, name: str, *words: str, **record: Any) -> Ended:
    """Run a step with sixteen episodes of two prompts, in whose records `notes` is a folder."""
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": "1 to 7", "answer": str(n), "notes": str(tmp_path)} | record for n in (3, 4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended: Ended = run(
        "grpo",
        f"--config={EXAMPLE / 'grpo.toml'}",
        f"--model={EXAMPLE / 'model'}",
        f"--data={data}",
        f"--agent.kind={kind}",
        f"--agent.name={name}",
        "--trainer.init=random",
        "--prompts_per_step=2",
        "--sampling.num_samples=8",
        "--steps=1",
        *words,
        small=False,
    )
    assert ended.code == 0, ended.sentence
    return ended


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("environment", f"{AGENTS}:HangsOnce"),
        ("function", f"{AGENTS}:hangs_once"),
        ("command", COMMAND),
    ],
)
def test_one_agent_that_hangs_costs_its_sample_alone(
    run: Any, tmp_path: Path, kind: str, name: str
) -> None:
    if kind != "environment":
        pytest.importorskip("uvicorn", reason="the extra 'agents' is not installed")
    seconds = 25 if kind == "command" else 4  # a busy machine starts sixteen programs slowly
    ended = trained(run, tmp_path, kind, name, f"--agent.deadline_s={seconds}")
    (row,) = ended.metrics
    samples = ended.samples(1)
    assert row["failed/timeout"] == row["reward/failed_samples"] == 1
    assert [one["status"] == "failed" for one in samples].count(True) == 1
    assert len(samples) == 16
    assert row["onpolicy/mismatched_tokens"] == 0
    assert row["onpolicy/compared_tokens"] > 0


def test_a_client_that_raises_for_a_cut_reply_is_learned(run: Any, tmp_path: Path) -> None:
    """One program raises before any reply, and the others for replies that were cut."""
    pytest.importorskip("uvicorn", reason="the extra 'agents' is not installed")
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompt, sample):\n    return 1.0\n")
    ended = trained(run, tmp_path, "command", COMMAND, f"--reward={reward}:score", raises=True)
    (row,) = ended.metrics
    learned = [one for one in ended.samples(1) if one["status"] != "failed"]
    assert (row["failed/agent"], len(learned)) == (1, 15)
    cut = [one for one in learned if one["status"] == "truncated"]
    assert cut, "two tokens of a random model seldom end a reply"
    assert {one["reward"] for one in cut} == {0.0}
    assert all("MaxTokens: the reply was cut" in one["metadata"]["error"] for one in cut)
    assert {one["reward"] for one in learned if one["status"] == "completed"} <= {1.0}
    assert row["rollout/truncated"] == len(cut) / len(learned)
    stages = {name: row[f"time/{name}_mean"] for name in ("agent", "decode", "grading")}
    assert min(stages.values()) >= 0
    assert stages["agent"] == max(stages.values()), "a program starts for longer than it is drawn"

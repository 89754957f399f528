"""Random faults and hostile requests against the gateway of a run, which learns all the same."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.agents.test_training import MODEL, write
from tests.dist.recipes.conftest import REPO, Ended, run_in

pytestmark = pytest.mark.agents
HOSTILE = REPO / "tests/agents/hostile.py"
PROMPTS, SAMPLES = 6, 6  # of a step


def hostile_run(folder: Path, kind: str, name: str, num_faults: int, steps: int) -> Ended:
    """Run GRPO with agents that attack. Each commits `num_faults` before each of its calls."""
    pytest.importorskip("uvicorn")
    notes = folder / "notes"
    notes.mkdir()
    numbers = (
        {
            "prompt": "1 to 7",
            "answer": str(n),
            "number": n,
            "num_faults": num_faults,
            "notes": str(notes),
        }
        for n in range(1, 8)
    )
    return run_in(
        folder,
        "grpo",
        f"--config={REPO / 'examples/environments/grpo.toml'}",
        f"--model={MODEL}",
        f"--data={write(folder / 'numbers.jsonl', numbers)}",
        f"--agent.kind={kind}",
        f"--agent.name={name}",
        "--agent.max_turns=100000",
        "--agent.max_failed=1",
        "--agent.on_error=fail",  # replies of two tokens are cut
        "--trainer.init=random",
        f"--prompts_per_step={PROMPTS}",
        f"--sampling.num_samples={SAMPLES}",
        f"--steps={steps}",
        small=False,
    )


def check(ended: Ended, folder: Path, steps: int) -> Counter[str]:
    """Check that nothing was lost and nothing of a failed episode learned; return the faults."""
    assert ended.code == 0, ended.sentence
    told = [json.loads(path.read_text()) for path in (folder / "notes").iterdir()]
    assert len(told) == steps * PROMPTS * SAMPLES
    assert [wrong for one in told for wrong in one["wrong"]] == []
    num_failed = 0
    for row in ended.metrics:
        samples = ended.samples(row["step"])
        failed = [one for one in samples if one["status"] == "failed"]
        learned = [one for one in samples if one["status"] != "failed"]
        assert len({one["prompt_uid"] for one in samples}) == PROMPTS
        drawn = sum(version >= 0 for one in learned for version in one["versions"])
        assert row["onpolicy/compared_tokens"] == drawn
        assert row["onpolicy/mismatched_tokens"] == 0
        assert row.get("failed/agent", 0) == len(failed)
        num_failed += len(failed)
    assert num_failed == sum(one["ends"] == "fails" for one in told)
    assert 0 < num_failed < len(told)
    return Counter(name for one in told for name in one["done"])


def test_a_thousand_faults_change_nothing_that_is_learned(tmp_path: Path) -> None:
    ended = hostile_run(tmp_path, "function", f"{HOSTILE}:attack", num_faults=14, steps=2)
    done = check(ended, tmp_path, steps=2)
    print(dict(done))
    assert sum(done.values()) >= 1000
    assert len(done) == 11


def test_programs_that_are_killed_lose_no_prompt(tmp_path: Path) -> None:
    name = f"{sys.executable} -m tests.agents.hostile {{base_url}} {{key}} {{task_file}}"
    ended = hostile_run(tmp_path, "command", name, num_faults=1, steps=1)
    check(ended, tmp_path, steps=1)

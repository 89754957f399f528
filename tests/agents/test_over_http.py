"""One game in three forms: an environment, a function with OpenAI's client, and a command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agents.test_training import MODEL, check_bits, write
from tests.dist.recipes.conftest import REPO, run_in

pytestmark = pytest.mark.agents

CLIENT = REPO / "tests/agents/client.py"
FORMS = {
    "environment": f"{REPO / 'examples/environments/higher_lower.py'}:HigherLower",
    "function": f"{CLIENT}:with_openai",
    "command": f"{sys.executable} {CLIENT} {{base_url}} {{key}} {{task_file}}",
}
OF_LEARNING = ("reward/mean", "train/loss", "onpolicy/compared_tokens", "train/grad_norm")


def test_a_game_is_the_same_over_http(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("openai")
    numbers = ({"prompt": "1 to 7", "answer": str(n), "number": n} for n in range(1, 8))
    data = write(tmp_path / "numbers.jsonl", numbers)
    learned: dict[str, list[dict[str, Any]]] = {}
    for kind, name in FORMS.items():
        ended = run_in(
            tmp_path,
            "grpo",
            f"--config={REPO / 'examples/environments/grpo.toml'}",
            f"--model={MODEL}",
            f"--data={data}",
            f"--agent.kind={kind}",
            f"--agent.name={name}",
            "--trainer.init=random",
            "--prompts_per_step=4",
            "--sampling.num_samples=4",
            "--steps=2",
            name=kind,
            small=False,
        )
        check_bits(ended, has_turns=kind == "environment")
        learned[kind] = [{key: row[key] for key in OF_LEARNING} for row in ended.metrics]
    assert learned["function"] == learned["environment"]
    assert learned["command"] == learned["environment"]

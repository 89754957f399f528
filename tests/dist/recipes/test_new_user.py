"""A new user's first job: chat data with tools, a CSV, a grader and an evaluation set of their own.

The commands are those of docs/data.md, docs/hooks.md and docs/watching.md.
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launched import Launched

REPO = Path(__file__).parents[3]
MODEL = REPO / "examples/math/model"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ message.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
GRADER = """
def grade(prompt, sample):
    digits = sum(letter.isdigit() for letter in sample.text)
    return {"reward": digits / max(len(sample.text), 1), "right": prompt.answer in sample.text}
"""

pytestmark = [pytest.mark.dist, pytest.mark.system]


def conversation(rng: random.Random) -> dict[str, Any]:
    """A question, a call of the tool, its result and the answer, as logged by OpenAI's API."""
    left, right = rng.randint(1, 9), rng.randint(1, 9)
    call = {"name": "add", "arguments": json.dumps({"a": left, "b": right})}
    asked = {"id": "call_1", "type": "function", "function": call}
    messages = [
        {"role": "user", "content": f"{left}+{right}?"},
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "call_1", "content": str(left + right)},
        {"role": "assistant", "content": f"{left + right}"},
    ]
    return {"messages": messages, "tools": [ADD]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, and the files that the user has."""
    rng = random.Random(0)
    shutil.copytree(MODEL, tmp_path / "model")
    for name, more in (
        ("tokenizer_config", {"chat_template": TEMPLATE, "model_max_length": 512}),
        ("config", {"max_position_embeddings": 512}),
    ):
        file = tmp_path / f"model/{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
    rows = [json.dumps(conversation(rng)) for _ in range(60)]
    (tmp_path / "log.jsonl").write_text("\n".join([*rows[:30], "{broken", *rows[30:]]) + "\n")
    for name, count in (("sums", 40), ("test", 6)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["question", "gold"])
            for _ in range(count):
                left, right = rng.randint(1, 9), rng.randint(1, 9)
                writer.writerow([f"What is {left}+{right}?", left + right])
    (tmp_path / "my_grader.py").write_text(GRADER)
    return tmp_path


def data(folder: Path, *words: str) -> str:
    """Run `spmd-rl data` with these words; return what it printed."""
    process = Launched(["data", *words], folder, os.environ | {"PYTHONPATH": str(REPO)})
    try:
        out, err = process.communicate(timeout=1000)
    finally:
        process.end()
    assert process.returncode == 0, err
    return out


CHAT = ("--prompts.chat_template=true", "--prompts.prompt_key=messages", "--prompts.answer_key=")
CSV = (
    "--prompts.chat_template=true",
    "--prompts.prompt_key=question",
    "--prompts.answer_key=gold",
    "--prompts.system=Answer with a number.",
)
SHORT = ("--trainer.lr=1e-3", "--sampling.max_tokens=8", "--sampling.num_samples=4")


def test_from_logs_and_a_table_to_a_curve(run: Any, folder: Path) -> None:
    said = data(folder, "convert", "log.jsonl", "chat.jsonl", "--from=openai")
    assert "log.jsonl:31: not valid JSON" in said
    assert "60 of 61 records converted" in said
    model, chat = folder / "model", folder / "chat.jsonl"
    assert "60 records, 0 problems" in data(folder, "check", str(chat), f"--model={model}", *CHAT)
    told = data(folder, "check", str(chat), f"--model={model}")
    assert all(word in told for word in ("as sft reads it", *CHAT))
    assert "tool 60" in data(folder, "stats", str(chat), *CHAT)

    taught = run(
        "sft",
        f"--model={model}",
        f"--data={chat}",
        *CHAT,
        "--steps=2",
        "--trainer.init=random",
        name="taught",
        small=False,
    )
    assert taught.code == 0, taught.sentence
    learned = run(
        "grpo",
        f"--model={taught.folder / 'hf'}",
        f"--data={folder / 'sums.csv'}",
        f"--reward={folder / 'my_grader.py'}:grade",
        f"--eval.data={folder / 'test.csv'}",
        "--eval.every=2",
        *CSV,
        *SHORT,
        "--steps=3",
        "--prompts_per_step=4",
        nproc=2,
        name="learned",
        small=False,
        draws=True,
    )
    assert learned.code == 0, learned.sentence
    lines = (learned.folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    evaluated = [row["step"] for row in rows if "eval/test/reward" in row]
    assert evaluated == [0, 2, 3]
    trained = [row for row in rows if "reward/mean" in row]
    assert all(row["onpolicy/mismatched_tokens"] == 0 for row in trained)
    assert all("reward/right" in row for row in trained)
    for name in ("report.html", "curves.png"):
        assert (learned.folder / name).stat().st_size > 10_000

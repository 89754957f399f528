"""The model card of an exported folder: its head in YAML, and what the run counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spmd_rl.train.checkpoint.model_card import hub_name, write_card


def write_run(run: Path) -> None:
    run.mkdir()
    (run / "config.toml").write_text('recipe = "grpo"\ndata = "train.jsonl"\nmodel = "m"\n')
    rows = [
        {"step": step, "onpolicy/compared_tokens": 1000, "onpolicy/mismatched_tokens": step - 1}
        for step in (1, 2, 3)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def card_of(folder: Path) -> tuple[dict[str, object], str]:
    """Return the head of the folder's card, and its text."""
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    pairs = (line.partition(": ") for line in head.splitlines())
    return {key: json.loads(value) if value[0] in '["' else value for key, _, value in pairs}, text


def test_a_card_says_what_the_run_was(tmp_path: Path) -> None:
    write_run(tmp_path / "mine")
    write_card(tmp_path / "mine", tmp_path / "mine", "/models/Qwen3: 8B")
    head, text = card_of(tmp_path / "mine")
    assert head == {
        "base_model": "Qwen3: 8B",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["spmd-rl", "grpo"],
    }
    assert "- recipe: `grpo`\n- data: `train.jsonl`\n- steps: 3\n" in text
    assert "of 3,000 tokens whose log-probs trainer and engine both computed, 3 differed" in text


def test_an_earlier_step_counts_what_was_before_it(tmp_path: Path) -> None:
    write_run(tmp_path / "mine")
    write_card(tmp_path / "mine", tmp_path / "mine", "m", step=2, note="They are merged.")
    _, text = card_of(tmp_path / "mine")
    assert (
        "- steps: 2\n" in text and "of 2,000 tokens" in text and "both computed, 1 differed" in text
    )
    assert text.endswith("\nThey are merged.\n")


@pytest.mark.parametrize(
    ("file", "library", "task"),
    [
        ('{"architectures": ["Qwen3ForCausalLM"]}', "transformers", "text-generation"),
        (
            '{"architectures": ["Qwen3ForSequenceClassification"]}',
            "transformers",
            "text-classification",
        ),
        ("", "peft", "text-generation"),
    ],
)
def test_the_kind_of_the_folder(tmp_path: Path, file: str, library: str, task: str) -> None:
    (tmp_path / ("config.json" if file else "adapter_config.json")).write_text(file)
    write_card(tmp_path, tmp_path / "no run", "m")
    head, _ = card_of(tmp_path)
    assert (head["library_name"], head["pipeline_tag"]) == (library, task)
    assert ("base_model_relation" in head) == (library == "peft")


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/models/Qwen3-8B", "Qwen3-8B"),
        ("/models/Qwen3-8B/", "Qwen3-8B"),
        ("/cache/hub/models--Qwen--Qwen3-8B/snapshots/0123", "Qwen/Qwen3-8B"),
        ("/cache/hub/models--gpt2/snapshots/0123", "gpt2"),
    ],
)
def test_the_name_of_a_model(folder: str, name: str) -> None:
    assert hub_name(folder) == name

"""The arithmetic example: its data is what its generator makes, its model folders load, its check
can fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from examples.arithmetic import check
from examples.arithmetic.check import Figure, learning
from examples.arithmetic.reward import correct
from spmd_rl.hooks.signatures import load_reward
from spmd_rl.model.read import read_spec
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from tests.unit.data.whole_files import read_records

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "arithmetic"
NAMES = ("train", "eval", "warmup")


def asked(name: str) -> list[tuple[int, int, int]]:
    rows = [record.row for record in read_records(str(EXAMPLE / f"{name}.jsonl"))]
    return [(*map(int, row["prompt"].rstrip("=").split("+")), int(row["answer"])) for row in rows]


def test_answers_are_right_and_held_out_prompts_are_held_out() -> None:
    train, held_out, warmup = (asked(name) for name in NAMES)
    assert all(a + b == answer for a, b, answer in train + held_out)
    trained_on = {(a, b) for a, b, _ in train + warmup}
    assert trained_on.isdisjoint((a, b) for a, b, _ in held_out)
    # the teacher is careless
    assert 0.4 < np.mean([a + b == answer for a, b, answer in warmup]) < 0.5


def test_the_right_answer_is_chosen() -> None:
    for name, answers in {"pairs": "train", "eval_pairs": "eval"}.items():
        rows = [record.row for record in read_records(str(EXAMPLE / f"{name}.jsonl"))]
        right = {f"{a}+{b}=": str(answer) for a, b, answer in asked(answers)}
        assert {row["prompt"] for row in rows} == right.keys()
        assert all(row["chosen"] == right[row["prompt"]] != row["rejected"] for row in rows)


@pytest.mark.parametrize(
    ("folder", "least", "most"), [("model", 0.1e6, 0.3e6), ("model-20m", 20e6, 40e6)]
)
def test_the_model_folders_load_in_transformers(folder: str, least: float, most: float) -> None:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / folder)
    config = AutoConfig.from_pretrained(EXAMPLE / folder)
    ids = tokenizer("37+48= ok\n")["input_ids"]
    assert (
        tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "37+48= ok\n"
    )
    assert len(ids) == 10
    assert len(tokenizer) <= config.vocab_size
    assert least <= read_spec(EXAMPLE / folder).num_parameters <= most


def test_the_reward() -> None:
    prompt = Prompt(0, np.zeros(1, np.int32), "37+48=", "85")
    none = np.zeros(0)
    said = {
        (text, status): correct(prompt, Sample(0, 0, none, none, none, status, text=text))
        for text, status in (
            ("85", "completed"),
            ("85", "truncated"),
            ("86", "completed"),
            (" 85", "completed"),
        )
    }
    assert [key for key, reward in said.items() if reward] == [("85", "completed")]
    assert load_reward(f"{EXAMPLE / 'reward.py'}:correct").function(
        prompt, Sample(0, 0, none, none, none, "completed", text="85")
    )


def lines(rewards: list[float], mismatched: int | None = 0) -> list[dict[str, float | None]]:
    return [{"reward/mean": reward, "onpolicy/mismatched_tokens": mismatched} for reward in rewards]


def failing(rows: list[dict[str, float | None]]) -> list[str]:
    return [figure.what for figure in learning(rows) if not figure.holds]


def test_the_check_passes_what_learned_and_fails_what_did_not() -> None:
    assert failing(lines([0.4, *[0.95] * 6])) == []
    assert failing(lines([0.6, *[0.95] * 6])) == ["reward of the first step"]
    assert failing(lines([0.4, *[0.85] * 6])) == ["mean reward of the last 5 steps"]
    assert failing(lines([0.4, *[0.95] * 6], mismatched=1)) == ["mismatched tokens"]
    assert failing(lines([0.4, *[0.95] * 6], mismatched=None)) == [
        "steps without a count of mismatched tokens"
    ]
    assert not Figure("x", float("nan"), ">= 0").holds


def test_the_check_of_an_empty_folder_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.arithmetic.check", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "holds no metrics" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("reward", "cpu_s", "code"), [(0.95, 170, 0), (0.95, 190, 1), (0.85, 170, 1)]
)
def test_the_check_runs_the_command_and_counts_its_processor_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: float, cpu_s: float, code: int
) -> None:
    rows = [
        row | {"step": i, "unix_s": time.time()}
        for i, row in enumerate(lines([0.4, *[reward] * 6]), 1)
    ]
    warmed_up = [{"step": 0, "unix_s": time.time(), "warmup/loss": 0.5}]
    (tmp_path / "made.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in warmed_up + rows)
    )
    for others in ("files", "exported"):
        monkeypatch.setattr(check, others, lambda *given: ())
    monkeypatch.setattr(check, "_cpu_s_of_children", lambda: cpu_s)
    command = ["mv", str(tmp_path / "made.jsonl"), str(tmp_path / "metrics.jsonl")]
    monkeypatch.setattr("sys.argv", ["check", str(tmp_path), "--", *command])
    assert check.main() == code


def test_processor_time_is_that_of_descendants() -> None:
    before = check._cpu_s_of_children()
    spins = "import time\nwhile time.process_time() < 0.3: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spins!r}], check=True)"
    subprocess.run([sys.executable, "-c", child], check=True)
    assert check._cpu_s_of_children() - before >= 0.3


def test_shipped_lines_are_plain_prompt_and_answer() -> None:
    for name in NAMES:
        for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines():
            assert set(json.loads(line)) == {"prompt", "answer"}

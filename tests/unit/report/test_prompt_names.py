"""Short names of prompts on the report page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from spmd_rl.observe.run_folder import RunFolder
from spmd_rl.report.prompt_names import MAX_NAME, prompt_name, user_text
from spmd_rl.report.samples import PageBudget, read_samples
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt, question_of
from spmd_rl.types.samples import Sample

CHAT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        (CHAT.format("What is 3 + 8?"), "What is 3 + 8?"),
        (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHow many?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "How many?",
        ),
        ("<s>[INST] Tell me [/INST]", "Tell me"),
        ("<start_of_turn>user\nHi there<end_of_turn>\n<start_of_turn>model\n", "Hi there"),
        ("<|user|>\nCount<|end|>\n<|assistant|>\n", "Count"),
        ("<｜begin▁of▁sentence｜><｜User｜>Go on<｜Assistant｜>", "Go on"),
        ("<|start|>user<|message|>Hello<|end|><|start|>assistant", "Hello"),
        ("[INST] one [/INST] 1 </s>[INST] two [/INST]", "two"),
        ("12+5=", "12+5="),
        ("if a user < 5 and b > 3 then", "if a user < 5 and b > 3 then"),
        ("", ""),
    ],
)
def test_a_prompt_is_named_by_what_the_user_said(prompt: str, name: str) -> None:
    assert prompt_name(prompt) == name


def test_the_recorded_question_wins_and_long_ones_lose_their_middle() -> None:
    assert prompt_name(CHAT.format("a"), "b\n c") == "b c"
    long = prompt_name("", "first words " + "x " * 100 + "last words")
    assert len(long) == MAX_NAME
    assert long.startswith("first words")
    assert long.endswith("last words")
    assert prompt_name("few shots " * 20 + "12+5=").endswith("12+5=")
    assert user_text(CHAT.format("x " * 100)) == ("x " * 100).strip()


@pytest.mark.parametrize(
    ("messages", "question"),
    [
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "a"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "b"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}], "a\n"),
        ([{"role": "system", "content": "a"}], ""),
        ([{"role": "user", "content": None}], ""),
    ],
)
def test_the_question_is_the_last_message_of_the_user(messages: list, question: str) -> None:
    assert question_of({"messages": messages}) == question
    assert question_of({}) == ""


def test_the_files_of_samples_keep_the_question(tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path / "run", "", {})
    one = np.zeros(1, np.int32)
    sample = Sample(0, 0, one, np.zeros(1, np.float32), one, "completed", text="85", reward=1.0)
    chat = {"messages": [{"role": "user", "content": "How many?"}]}
    strange = Prompt(0, one, text="%%user%%How many?%%", chat=chat)
    run.write_samples(1, [Group(strange, [sample])])
    run.write_samples(2, [Group(Prompt(0, one, text="plain"), [sample])])
    files = sorted(run.samples.iterdir())
    assert [json.loads(file.read_text()).get("question") for file in files] == ["How many?", None]
    steps = read_samples(run.path, {}, PageBudget())["steps"]
    assert [step["groups"][0]["name"] for step in steps] == ["How many?", "plain"]

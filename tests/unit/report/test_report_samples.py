"""Samples and spans on the report page, and the texts of single tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.errors import DataError
from spmd_rl.observe.run_folder import RunFolder
from spmd_rl.observe.timeline import write_chrome
from spmd_rl.report.samples import PageBudget, coarse_to_fine_order, evenly_spaced, read_samples
from spmd_rl.report.spans import read_timeline
from spmd_rl.report.token_texts import find_tokenizer, token_texts
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from tests.unit.report.synthetic import HOSTILE, make_run


def first_group(shown: dict[str, Any]) -> dict[str, Any]:
    return shown["steps"][0]["groups"][0]


def test_tokens_say_what_they_say(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=1, num_ranks=1, tokenizer=True)
    samples = first_group(read_samples(run, {}, PageBudget()))["samples"]
    for sample in samples:
        assert sample["known"]
        assert (
            len(sample["pieces"])
            == len(sample["tokens"])
            == len(sample["logprobs"])
            == sample["num_tokens"]
        )
        assert sample["versions"] == [3]
        text = "".join(sample["pieces"])
        assert "→ naïve\n" in text  # of several tokens each: whole characters, none torn
        assert text.endswith("<|end|>") == (sample["status"] == "completed")


def test_an_episode_shows_its_turns_its_agent_and_its_context(tmp_path: Path) -> None:
    tokens = np.array([5, 6, 7], np.int32)
    drawn = np.array([2, -1, 3], np.int32)
    records = [
        {"agent": "first", "state": "", "reward": 0.5, "first_token": 0, "num_tokens": 1},
        {"agent": "first", "state": "", "reward": 1.0, "first_token": 2, "num_tokens": 1},
    ]
    logprobs = np.zeros(3, np.float32)
    sample = Sample(0, 0, tokens, logprobs, drawn, "completed", text="abc", reward=1.5)
    played = sample.replace(metadata={"turns": records, "agent": "first"}, execution=4)
    own = sample.replace(index=1, context=np.arange(1200, dtype=np.int32))
    odd = sample.replace(index=2, metadata={"turns": "three", "agent": HOSTILE})
    run = RunFolder.open(tmp_path / "run", "", {})
    run.write_samples(1, [Group(Prompt(0, tokens), [played, own, odd])])
    first, second, third = first_group(read_samples(run.path, {}, PageBudget()))["samples"]
    assert first["turns"] == [{"first": 0, "reward": 0.5}, {"first": 2, "reward": 1.0}]
    assert (first["agent"], first["execution"]) == ("first", 4)
    assert (second["context"], second["turns"], "context" in first) == ("1,200 tokens", [], False)
    assert third["turns"] == []


def test_what_no_engine_drew_has_no_log_prob_and_a_failed_sample_says_why(tmp_path: Path) -> None:
    tokens = np.array([5, 6, 7], np.int32)
    drawn = np.array([2, -1, 3], np.int32)
    logprobs = np.array([-0.5, 0, -1.5], np.float32)
    sample = Sample(0, 0, tokens, logprobs, drawn, "completed", text="abc", reward=1.0)
    failed = sample.replace(index=1, status="failed", metadata={"error": "the tool hung"})
    run = RunFolder.open(tmp_path / "run", "", {})
    run.write_samples(1, [Group(Prompt(0, tokens), [sample], [failed])])
    shown = first_group(read_samples(run.path, {}, PageBudget()))["samples"]
    assert [one["logprobs"] for one in shown] == [[-0.5, None, -1.5]] * 2
    assert [one["versions"] for one in shown] == [[2, -1, 3]] * 2
    assert [(one["status"], one["error"]) for one in shown] == [
        ("completed", ""),
        ("failed", "the tool hung"),
    ]


def test_what_a_judge_noted_is_shown_and_takes_room(tmp_path: Path) -> None:
    tokens = np.array([5, 6, 7], np.int32)
    notes = {"judge": f"too long: {HOSTILE}" + "x" * 900}
    sample = Sample(0, 0, tokens, np.zeros(3, np.float32), tokens, "completed", text="abc")
    noted = [sample.replace(index=index, metadata={"notes": notes}) for index in range(4)]
    odd = sample.replace(metadata={"notes": "none"})
    run = RunFolder.open(tmp_path / "run", "", {})
    groups = [Group(Prompt(0, tokens), noted), Group(Prompt(1, tokens), [odd])]
    run.write_samples(1, groups)
    shown = read_samples(run.path, {}, PageBudget())["steps"][0]["groups"]
    assert [one["notes"] for group in shown for one in group["samples"]] == [notes] * 4 + [{}]
    few = read_samples(run.path, {}, PageBudget(num_tokens=600))["steps"][0]["groups"]
    assert len(few) == 1, "two hundred tokens' room for each sample"


@given(st.text(max_size=60), st.lists(st.integers(0, 299), max_size=40))
def test_without_a_tokenizer_the_text_is_cut_evenly_and_whole(text: str, tokens: list[int]) -> None:
    parts, known = token_texts(None, tokens, text)
    assert not known
    assert "".join(parts) == text
    assert len(parts) == max(1, len(tokens))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_tokenizer_that_did_not_make_the_text_is_not_believed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=1, num_ranks=1, tokenizer=True)
    tokenizer = find_tokenizer(run, {})
    assert token_texts(tokenizer, [5, 6], "something else") == (["somethi", "ng else"], False)
    assert token_texts(tokenizer, [10**9], "x") == (["x"], False)


def test_the_tokenizer_of_the_model_that_the_config_names_serves_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=1, num_ranks=1, tokenizer=True)
    model = (run / "hf").rename(tmp_path / "model")
    assert find_tokenizer(run, {}) is None
    assert find_tokenizer(run, {"trainer.model": str(model)}) is not None
    (model / "tokenizer.json").write_text("{broken")
    assert find_tokenizer(run, {"model": str(model)}) is None


def test_a_page_has_room_for_some_steps_and_whole_groups(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", num_steps=30, num_ranks=1, text="y" * 300, sample_steps=range(1, 31)
    )
    shown = read_samples(run, {}, PageBudget(num_steps=5, num_tokens=10_000))
    assert [step["step"] for step in shown["steps"]] == [1, 8, 15, 23, 30]
    assert shown["num_steps"] == 30
    for step in shown["steps"]:
        # of 1,040 tokens each, all told, where a step has room for 2,000
        assert len(step["groups"]) == 2
        assert step["num_samples"] == 48
        assert all(len(group["samples"]) == 8 for group in step["groups"])


def test_when_room_runs_out_the_last_and_first_steps_are_there(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", num_steps=9, num_ranks=1, text="y" * 300, sample_steps=range(1, 10)
    )
    shown = read_samples(run, {}, PageBudget(num_steps=9, num_tokens=1600))
    assert [step["step"] for step in shown["steps"]] == [1, 9]


def test_a_long_answer_keeps_its_beginning_and_end(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 26) for i in range(300))
    run = make_run(tmp_path / "run", num_steps=1, num_ranks=1, text=text)
    sample = first_group(read_samples(run, {}, PageBudget(tokens_per_sample=10)))["samples"][0]
    assert (sample["num_tokens"], sample["left_out_at"]) in ((100, 5), (101, 5))
    assert len(sample["pieces"]) == len(sample["tokens"]) == len(sample["logprobs"]) == 10
    assert text.startswith("".join(sample["pieces"][:5]))
    assert text.endswith("".join(sample["pieces"][5:]))


def test_values_that_are_no_numbers_are_none(tmp_path: Path) -> None:
    row = {
        "prompt_uid": 1,
        "index": 0,
        "prompt": "p",
        "text": "ab",
        "reward": float("nan"),
        "tokens": [1, 2],
        "logprobs": [-0.5, float("-inf")],
    }
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_00001.jsonl").write_text(json.dumps(row) + "\n")
    sample = first_group(read_samples(tmp_path, {}, PageBudget()))["samples"][0]
    assert sample["reward"] is None
    assert sample["logprobs"] == [-0.5, None]
    assert sample["versions"] == []


@pytest.mark.parametrize("line", ["{", "[1]", '"x"'])
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_00001.jsonl").write_text("\n" + line + "\n")
    with pytest.raises(DataError, match=r"step_00001\.jsonl:2: not"):
        read_samples(tmp_path, {}, PageBudget())


@given(st.integers(0, 300), st.integers(2, 50))
def test_steps_are_spread_from_first_to_last(num_items: int, num: int) -> None:
    items = list(range(num_items))
    chosen = evenly_spaced(items, num)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(num, num_items)
    assert not items or (chosen[0], chosen[-1]) == (items[0], items[-1])
    assert sorted(coarse_to_fine_order(num_items)) == items


def test_the_timeline_shows_whole_steps_of_every_process(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=40, num_ranks=3)
    shown = read_timeline(run, max_steps=4)
    assert [step["step"] for step in shown["steps"]] == [1, 14, 27, 40]
    assert shown["num_steps"] == 40
    for step in shown["steps"]:
        assert [(lane["process"], lane["lane"]) for lane in step["lanes"]] == [
            ("controller", "MainThread"),
            ("controller", "calls"),
            *((f"rank {rank}", "MainThread") for rank in range(3)),
        ]
        assert [lane["num_rows"] for lane in step["lanes"]] == [2, 1, 2, 2, 2]
        for lane in step["lanes"]:
            for row, start_us, length_us, name, _ in lane["spans"]:
                assert 0 <= row < lane["num_rows"]
                assert 0 <= start_us <= start_us + length_us <= step["length_us"]
                assert shown["names"][name]


def test_a_timeline_too_full_shows_fewer_steps_and_the_longest_spans(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=8, num_ranks=2)
    per_step = 1 + 6 + 2 * 9
    shown = read_timeline(run, max_steps=8, max_spans=3 * per_step)
    assert [step["step"] for step in shown["steps"]] == [1, 5, 8]
    [only] = read_timeline(run, max_steps=8, max_spans=10)["steps"]
    assert (only["step"], only["num_left_out"]) == (8, per_step - 10)
    assert sum(len(lane["spans"]) for lane in only["lanes"]) == 10


def test_a_run_that_kept_only_its_trace_json_has_the_same_timeline(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_steps=4, num_ranks=2)
    write_chrome(run)
    recorded = read_timeline(run)
    for path in (run / "traces").iterdir():
        path.unlink()
    merged = read_timeline(run)
    assert [step["step"] for step in merged["steps"]] == [
        step["step"] for step in recorded["steps"]
    ]
    for ours, theirs in zip(merged["steps"], recorded["steps"], strict=True):
        assert [lane["process"] for lane in ours["lanes"]] == [
            lane["process"] for lane in theirs["lanes"]
        ]
        assert ours["length_us"] == pytest.approx(theirs["length_us"], abs=1)


def test_a_trace_without_steps_is_shown_as_one(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    head = {"process": "rank 0", "rank": 0, "host": "h", "pid": 1, "began_unix_ns": 10**18}
    lines = [head, ["load", 5_000, 2_000_000, "MainThread", {"note": HOSTILE}]]
    (tmp_path / "traces" / "rank_0.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    [step] = read_timeline(tmp_path)["steps"]
    assert (step["step"], step["length_us"]) == (None, 2000)


def test_a_step_done_again_after_a_restart_counts_as_done_last(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    head = {"process": "controller", "rank": None, "host": "h", "pid": 1, "began_unix_ns": 10**18}
    again = head | {"began_unix_ns": 2 * 10**18}
    lines = [
        head,
        ["step", 0, 10_000, "MainThread", {"step": 7}],
        again,
        ["step", 0, 70_000, "MainThread", {"step": 7}],
    ]
    (tmp_path / "traces" / "controller.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    shown = read_timeline(tmp_path)
    assert [step["length_us"] for step in shown["steps"]] == [70]

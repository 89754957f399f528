"""`spmd-rl mismatch` on a run folder: exit codes, sentences, the page and the JSON."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import grpo_proof
from spmd_rl import cli
from spmd_rl.microscope.engine_path import EnginePath
from spmd_rl.microscope.faults import plant
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.engine import EngineConfig

SENTENCE = {"prompt_uid": 7, "prompt": "15+29=", "answer": "44", "text": "44", "reward": 1.0, "finish": "stop"}


@pytest.fixture
def run(tmp_path: Path, folder: Path) -> Path:
    run = tmp_path / "demo"
    (run / "samples").mkdir(parents=True)
    shutil.copytree(folder, run / "hf")
    (run / "config.toml").write_text('[engine]\npage_size = 4\ndtype = "float32"\n[sampling]\ntemperature = 0.7\n')
    for step in (1, 2):
        rows = [SENTENCE | {"index": i, "tokens": [22, 22, 20 + i + step, 1]} for i in range(3)]
        rows.append(SENTENCE | {"index": 3, "tokens": []})
        (run / "samples" / f"step_{step:05d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture
def mismatch(monkeypatch: pytest.MonkeyPatch):
    def call(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["spmd-rl", "mismatch", *map(str, words)])
        return cli.main()

    return call


def test_a_run_whose_sides_agree_exits_zero(run: Path, mismatch, capsys) -> None:
    assert mismatch(run) == 0
    sentence, page = capsys.readouterr().out.splitlines()
    assert "agree in every bit" in sentence
    assert Path(page) == run / "mismatch" / "mismatch.html"
    data = json.loads((run / "mismatch" / "mismatch.json").read_text())
    assert data["agree"] is True
    assert [one["name"] for one in data["sequences"]] == ["7:0", "7:1", "7:2"]
    assert data["verdict"] in (run / "mismatch" / "mismatch.html").read_text()


def test_what_the_run_counted_is_told_where_the_replay_sees_nothing(run: Path, mismatch, capsys) -> None:
    rows = [
        {"step": 1, "onpolicy/mismatched_tokens": 1200.0},
        {"step": 2, "onpolicy/mismatched_tokens": 34.0},
        {"step": 3},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert mismatch(run) == 0
    said = capsys.readouterr().out
    assert "agree in every bit" in said
    assert "the run itself counted 1,234 unequal tokens. This is another process, on cpu in float32" in said
    assert mismatch(run, "--plant", "split-k") == 1
    assert "itself counted" not in capsys.readouterr().out


@pytest.mark.parametrize(("engine", "trainer"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_each_side_computes_in_the_type_of_its_role(run: Path, mismatch, capsys, engine: str, trainer: str) -> None:
    (run / "config.toml").write_text(f'[engine]\npage_size = 4\ndtype = "{engine}"\n[trainer]\ndtype = "{trainer}"\n')
    assert mismatch(run) == 1
    out, err = capsys.readouterr()
    said = out.splitlines()
    assert said, err
    assert said[0] == f"The engine computes in {engine}, the trainer in {trainer}: no op has the same bits."
    data = json.loads((run / "mismatch" / "mismatch.json").read_text())
    assert data["versions"]["dtype"] == f"torch.{engine}, torch.{trainer}"
    assert mismatch(run, "--dtype", "float32") == 0
    capsys.readouterr()
    assert mismatch(run, "--left", "trainer", "--right", "transformers") in (0, 1)
    assert "computes in" not in capsys.readouterr().out, "transformers takes the type of the other side"


def test_a_planted_fault_exits_one_and_the_page_shows_it(run: Path, mismatch, capsys, tmp_path: Path) -> None:
    assert mismatch(run, "--samples", "7:1", "--plant", "split-k", "--out", tmp_path / "out") == 1
    out = capsys.readouterr().out
    assert out.startswith("layer 1 down_proj: ")
    assert "K summed in 2 parts" in out
    data = json.loads((tmp_path / "out" / "mismatch.json").read_text())
    assert (data["first"]["layer"], data["first"]["op"]) == (1, "down_proj")
    assert data["causes"][0]["left"]["arithmetic"][0].startswith("K summed in 2 parts")
    assert sum(data["first"]["on_same_input"]["counts"][1:]) > 0
    page = (tmp_path / "out" / "mismatch.html").read_text()
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert page.count("<svg") >= 5
    assert "layer 1 down_proj: introduced" in page


def test_prompts_need_no_run(folder: Path, mismatch, capsys, tmp_path: Path) -> None:
    words = ("--model", folder, "--prompts", "15+29=", "1+1=", "--right", "transformers", "--out", tmp_path)
    assert mismatch(*words) == 1
    assert capsys.readouterr().out.startswith("layer 0 attention: ")
    data = json.loads((tmp_path / "mismatch.json").read_text())
    assert [one["name"] for one in data["sequences"]] == ["prompt 1", "prompt 2"]
    assert {one["op"] for one in data["causes"]} >= {"attention", "act"}


def test_the_newest_sample_of_a_name_is_replayed(run: Path, mismatch) -> None:
    assert mismatch(run, "--samples", "7:2") == 0
    newest = json.loads((run / "samples" / "step_00002.jsonl").read_text().splitlines()[2])
    sequences = json.loads((run / "mismatch" / "mismatch.json").read_text())["sequences"]
    assert [(one["name"], one["response_tokens"]) for one in sequences] == [("7:2", len(newest["tokens"]))]


BAD = {
    "no gpu": (["{run}", "--device=cuda"], "torch sees no GPU here"),
    "a folder that is no run": (["{tmp}"], "is not the folder of a run"),
    "nothing to replay": ([], "name the folder of a run"),
    "a sample that is not there": (["{run}", "--samples", "7:99"], "has a sample 7:99"),
    "the same path twice": (["{run}", "--left", "trainer"], "both paths are 'trainer'"),
    "a fault on another side": (["{run}", "--left", "transformers", "--plant", "split-k"], "--left engine"),
    "an unknown fault": (["{run}", "--plant", "x"], "invalid choice"),
    "a model without prompts": (["--model", "{run}/hf"], "--model needs --prompts"),
    "a folder without weights": (["--model", "{tmp}", "--prompts", "1+1"], "it has no config.json"),
    "a prompt of one token": (["--model", "{run}/hf", "--prompts", "1"], "one to decode"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exits_two(run: Path, mismatch, capsys, tmp_path: Path, case: str) -> None:
    words, said = BAD[case]
    assert mismatch(*(word.format(tmp=tmp_path, run=run) for word in words)) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_a_broken_sample_file_is_named(run: Path, mismatch, capsys) -> None:
    (run / "samples" / "step_00002.jsonl").write_text("{}\n")
    assert mismatch(run) == 2
    assert "step_00002.jsonl:1" in capsys.readouterr().err


def test_a_run_that_exported_nothing_says_so(run: Path, mismatch, capsys) -> None:
    shutil.rmtree(run / "hf")
    assert mismatch(run) == 2
    assert "name a model with --model" in capsys.readouterr().err


def test_a_run_with_attention_in_splits_is_replayed_without_where_they_cannot_run(run: Path, mismatch, capsys) -> None:
    config = run / "config.toml"
    split = "attention_split = 128"
    config.write_text(config.read_text().replace("[engine]", f"[trainer]\n{split}\n[engine]\n{split}"))
    assert mismatch(run) == 0
    notice, sentence, _ = capsys.readouterr().out.splitlines()
    assert "attention_split needs FlashAttention-4" in notice
    assert "agree in every bit" in sentence


@pytest.mark.parametrize("fault", [None, "logits-bf16"])
def test_the_proof_compares_whole_rows_of_logits(
    run: Path, folder: Path, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def path(model: CausalLM, cfg: EngineConfig) -> EnginePath:
        made = EnginePath(model, cfg)
        if fault:
            plant(fault, made)
        return made

    for name, value in {"DEVICE": torch.device("cpu"), "DTYPE": torch.float32, "EnginePath": path}.items():
        monkeypatch.setattr(grpo_proof, name, value)
    logits, unequal = grpo_proof.replayed("demo", folder, run)
    assert (logits.value, logits.holds) == (4, False), "one sample's, fewer than the bar"
    assert unequal.holds is (fault is None)
    assert unequal.value == (8 if fault else 0), "its logits and its log-probs"

"""`spmd-rl mismatch` on a run folder: exit codes, sentences, the page and the JSON."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks import grpo_proof
from spmd_rl.cli import main
from spmd_rl.errors import SpmdError
from spmd_rl.microscope import sides
from spmd_rl.microscope.diagnose.faults import plant
from spmd_rl.microscope.options import check_sides, parse_options
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import TrainerPass, load_model
from spmd_rl.microscope.replay.inputs import case_of_samples, find_samples, mismatched_tokens
from spmd_rl.microscope.replay.kv_provenance import KvProvenance
from spmd_rl.microscope.taps.taps import HashTap
from spmd_rl.model.hf import random_weights, read_weights, save_folder
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.network import CausalLM
from spmd_rl.model.peft_folder import save_adapters
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.train.checkpoint.checkpoint_index import INDEX_FILE, merged
from spmd_rl.train.checkpoint.shards import write_shards
from spmd_rl.train.checkpoint.trainer_state import TrainerState
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.plan.layout import Piece

SENTENCE = {
    "prompt_uid": 7,
    "prompt": "15+29=",
    "prompt_tokens": [19, 23, 13, 20, 27, 31],
    "answer": "44",
    "text": "44",
    "reward": 1.0,
    "status": "completed",
}


@pytest.fixture
def run(tmp_path: Path, folder: Path) -> Path:
    run = tmp_path / "demo"
    (run / "samples").mkdir(parents=True)
    shutil.copytree(folder, run / "hf")
    (run / "config.toml").write_text(
        '[engine]\npage_size = 4\ndtype = "float32"\n[sampling]\ntemperature = 0.7\n'
    )
    for step in (1, 2):
        rows = [SENTENCE | {"index": i, "tokens": [22, 22, 20 + i + step, 1]} for i in range(3)]
        rows.append(SENTENCE | {"index": 3, "tokens": []})
        (run / "samples" / f"step_{step:05d}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return run


@pytest.fixture
def mismatch(monkeypatch: pytest.MonkeyPatch):
    def call(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["spmd-rl", "mismatch", *map(str, words)])
        return main.main()

    return call


def replayed(run: Path, name: str = "engine-trainer") -> dict[str, Any]:
    """What a replay left behind, which no reader of JSON refuses."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = (run / "mismatch" / f"{name}.json").read_text()
    return json.loads(text, parse_constant=refuse)


def poison(model: Path, name: str, value: float) -> None:
    weights = dict(read_weights(model))
    weights[name] = weights[name].clone()
    weights[name].view(-1)[0] = value
    save_folder(model, model, weights.items())


def checkpoint(folder: Path, weights: dict[str, torch.Tensor], version: int) -> None:
    """As a run leaves it, of one rank."""
    trainer = folder / "trainer"
    trainer.mkdir(parents=True)
    state = {"weights": list(LocalTensors.whole(weights).items())}
    layout = {
        "weights": [Piece(name, one.shape, one.dtype, one.box) for name, one in state["weights"]]
    }
    written = write_shards(trainer, 0, state)
    index = merged(TrainerState(version, version), {}, [layout], [written])
    (trainer / INDEX_FILE).write_bytes(msgspec.json.encode(index))
    (folder / "state.json").write_text(
        json.dumps({"next_step": version, "seed": 0, "roles": {"trainer": {}}})
    )


def test_a_run_whose_sides_agree_exits_zero(run: Path, mismatch, capsys) -> None:
    assert mismatch(run) == 0
    sentence, page = capsys.readouterr().out.splitlines()
    assert "agree in every bit" in sentence
    assert Path(page) == run / "mismatch" / "engine-trainer.html"
    data = json.loads((run / "mismatch" / "engine-trainer.json").read_text())
    assert data["agree"] is True
    assert [one["name"] for one in data["sequences"]] == ["7:0", "7:1", "7:2"]
    assert data["verdict"] in (run / "mismatch" / "engine-trainer.html").read_text()


def test_what_the_run_counted_is_told_where_the_replay_sees_nothing(
    run: Path, mismatch, capsys
) -> None:
    rows = [
        {"step": 1, "onpolicy/mismatched_tokens": 1200.0},
        {"step": 2, "onpolicy/mismatched_tokens": 34.0},
        {"step": 3},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert mismatch(run) == 0
    said, _ = capsys.readouterr().out.splitlines()
    assert "agree in every bit" in said
    assert (
        "the run itself counted 1,234 unequal tokens: 1,200 in step 1, 34 in step 2. "
        "3 of its samples were" in said
    )
    assert "in another process, on cpu in float32" in said
    assert "But the run itself" in (run / "mismatch" / "engine-trainer.html").read_text()
    assert mismatch(run, "--prompts", "1+1=") == 0
    assert "itself counted" not in capsys.readouterr().out, (
        "what the run never saw says nothing of it"
    )
    assert mismatch(run, "--plant", "split-k") == 1
    assert "itself counted" not in capsys.readouterr().out


@pytest.mark.parametrize(("engine", "trainer"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_each_side_computes_in_the_type_of_its_role(
    run: Path, mismatch, capsys, engine: str, trainer: str
) -> None:
    (run / "config.toml").write_text(
        f'[engine]\npage_size = 4\ndtype = "{engine}"\n[trainer]\ndtype = "{trainer}"\n'
    )
    assert mismatch(run) == 1
    out, err = capsys.readouterr()
    said = out.splitlines()
    assert said, err
    assert said[0] == f"The engine computes in {engine}, the trainer in {trainer}."
    data = json.loads((run / "mismatch" / "engine-trainer.json").read_text())
    assert data["versions"]["dtype"] == f"torch.{engine}, torch.{trainer}"
    assert mismatch(run, "--dtype", "float32") == 0
    capsys.readouterr()
    assert mismatch(run, "--left", "trainer", "--right", "transformers") in (0, 1)
    assert "computes in" not in capsys.readouterr().out, (
        "transformers takes the type of the other side"
    )


def test_a_planted_fault_exits_one_and_the_page_shows_it(
    run: Path, mismatch, capsys, tmp_path: Path
) -> None:
    assert mismatch(run, "--samples", "7:1", "--plant", "split-k", "--out", tmp_path / "out") == 1
    out = capsys.readouterr().out
    assert out.startswith("layer 1 down_proj: ")
    assert "K summed in 2 parts" in out
    data = json.loads((tmp_path / "out" / "engine-trainer.split-k.json").read_text())
    assert (data["first"]["layer"], data["first"]["op"]) == (1, "down_proj")
    assert data["causes"][0]["left"]["arithmetic"][0].startswith("K summed in 2 parts")
    assert sum(data["first"]["on_same_input"]["counts"][1:]) > 0
    page = (tmp_path / "out" / "engine-trainer.split-k.html").read_text()
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert page.count("<svg") >= 5
    assert "layer 1 down_proj: introduced" in page


def test_prompts_need_no_run(folder: Path, mismatch, capsys, tmp_path: Path) -> None:
    prompts = "15+29=" * 4, "17+18=" * 5
    words = ("--model", folder, "--prompts", *prompts, "--right", "transformers", "--out", tmp_path)
    assert mismatch(*words) == 1
    assert re.match(r"layer 0 (attention|[qkv]_proj): ", capsys.readouterr().out), (
        "BLAS has other sums for other rows"
    )
    data = json.loads((tmp_path / "engine-transformers.json").read_text())
    assert [one["name"] for one in data["sequences"]] == ["prompt 1", "prompt 2"]
    assert {one["op"] for one in data["causes"]} >= {"attention", "act"}


def test_the_newest_sample_of_a_name_is_replayed(run: Path, mismatch) -> None:
    assert mismatch(run, "--samples", "7:2") == 0
    newest = json.loads((run / "samples" / "step_00002.jsonl").read_text().splitlines()[2])
    sequences = json.loads((run / "mismatch" / "engine-trainer.json").read_text())["sequences"]
    assert [(one["name"], one["response_tokens"]) for one in sequences] == [
        ("7:2", len(newest["tokens"]))
    ]


BAD = {
    "no gpu": (["{run}", "--device=cuda"], "torch sees no GPU here"),
    "a folder that is no run": (["{tmp}"], "is not the folder of a run"),
    "nothing to replay": ([], "name the folder of a run"),
    "a sample that is not there": (["{run}", "--samples", "7:99"], "has no sample 7:99"),
    "the same path twice": (
        ["{run}", "--left", "trainer"], "--left and --right are both 'trainer'"),
    "a fault on another side": (
        ["{run}", "--left", "transformers", "--plant", "split-k"], "--left engine"),
    "an unknown fault": (["{run}", "--plant", "x"], "invalid choice"),
    "a model without prompts": (["--model", "{run}/hf"], "--model needs --prompts"),
    "a folder without weights": (["--model", "{tmp}", "--prompts", "1+1"], "it has no config.json"),
    "a step without samples": (
        ["{run}", "--step", "9"], "step 9 of {run} has no samples to replay"),
    "samples beside prompts": (
        ["{run}", "--samples", "7:0", "--prompts", "1+1="], "leave out --samples"),
    "a file in the folder's place": (["{run}", "--out", "{run}/config.toml"], "cannot be made"),
    "a prompt of one token": (["--model", "{run}/hf", "--prompts", "1"], "one to decode"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exits_two(
    run: Path, mismatch, capsys, tmp_path: Path, case: str
) -> None:
    words, said = BAD[case]
    assert mismatch(*(word.format(tmp=tmp_path, run=run) for word in words)) == 2
    captured = capsys.readouterr()
    assert said.format(run=run) in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_a_mixture_of_experts_is_compared(folder: Path, mismatch, capsys, tmp_path: Path) -> None:
    model, out = tmp_path / "mixture", tmp_path / "out"
    shutil.copytree(folder, model)
    config = json.loads((model / "config.json").read_text())
    mixture = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    mixture["moe_intermediate_size"] = 8
    (model / "config.json").write_text(json.dumps(config | mixture))
    save_folder(model, model, random_weights(read_spec(model), seed=0))
    words = ("--model", model, "--prompts", "1+1=", "--out", out)
    assert mismatch(*words, "--right", "megatron") == 2
    assert "a mixture of experts, which megatron does not replay here" in capsys.readouterr().err
    assert not out.exists()
    assert mismatch(*words) == 0
    assert "agree in every bit" in capsys.readouterr().out


BROKEN = {
    "{}": "it lacks 'tokens'",
    '{"prompt_uid": 7, "index": 0, "tokens": [22, 1]}': "it lacks 'prompt'",
    '{"prompt_uid": 7, "index": 0, "prompt": "1+1=", "tokens": [22, "x"]}': "str",
    '{"prompt_uid": 7, "index": 0, "prompt": "1=", "tokens": [22, 1], "logprobs": [-1.0]}': (
        "2 tokens and 1 log-probs"
    ),
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_sample_file_is_named(run: Path, mismatch, capsys, line: str) -> None:
    (run / "samples" / "step_00002.jsonl").write_text(f"{line}\n")
    assert mismatch(run) == 2
    said = capsys.readouterr().err
    assert "step_00002.jsonl:1" in said
    assert BROKEN[line] in said


def test_a_damaged_line_of_metrics_is_skipped_with_a_warning(run: Path) -> None:
    lines = (
        "no",
        '{"step": 1, "onpolicy/mismatched_tokens": 3}',
        '{"step": 2, "onpolicy/mismatched_tokens": "x"}',
    )
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.warns(
        UserWarning, match=r"metrics\.jsonl:1: not valid JSON.*; this line is skipped"
    ):
        assert mismatched_tokens(run) == {1: 3}


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x1c"])
def test_a_sample_may_hold_any_separator_of_lines(run: Path, separator: str) -> None:
    """What `RunFolder.write_samples` writes holds some of them as they are."""
    path = sorted((run / "samples").iterdir())[-1]
    row = json.loads(path.read_bytes().split(b"\n")[0]) | {"prompt": f"1{separator}1="}
    path.write_text(json.dumps(row, ensure_ascii=separator < " ") + "\n", encoding="utf-8")
    assert find_samples(run)[0].prompt == f"1{separator}1="


def test_the_newest_step_that_has_samples_is_replayed(run: Path, mismatch) -> None:
    (run / "samples" / "step_00003.jsonl").write_text("")
    (run / "samples" / "step_00004.jsonl").write_text(
        json.dumps(SENTENCE | {"index": 0, "tokens": []}) + "\n"
    )
    assert mismatch(run, "--samples", "7:0,") == 0
    assert mismatch(run) == 0
    assert [one["name"] for one in replayed(run)["sequences"]] == ["7:0", "7:1", "7:2"]


def test_a_token_that_no_engine_drew_has_no_log_prob_to_compare(run: Path) -> None:
    row = SENTENCE | {
        "index": 0,
        "tokens": [22, 22, 1],
        "logprobs": [-1.0, 0.0, -2.0],
        "versions": [3, -1, 4],
    }
    (run / "samples" / "step_00002.jsonl").write_text(json.dumps(row) + "\n")
    (sample,) = find_samples(run)
    assert sample.prompt_tokens.tolist() == SENTENCE["prompt_tokens"]
    assert sample.logprobs is not None
    assert [math.isnan(value) for value in sample.logprobs.tolist()] == [False, True, False]
    assert sample.versions == {3, 4}


def test_by_default_samples_are_of_many_prompts(run: Path) -> None:
    lines = [
        SENTENCE | {"prompt_uid": uid, "index": i, "tokens": [22, 1]}
        for uid in (5, 9, 6)
        for i in range(4)
    ]
    (run / "samples" / "step_00003.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    names = [one.name for one in find_samples(run)]
    assert names == ["5:0", "9:0", "6:0", "5:1", "9:1", "6:1", "5:2", "9:2"]
    assert [one.name for one in find_samples(run, ["9:3", "5:0"])] == ["9:3", "5:0"]
    assert {one.name for one in find_samples(run, step=2)} == {"7:0", "7:1", "7:2"}


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), SpmdError("weights are gone")])
def test_a_failure_is_no_answer(
    run: Path, mismatch, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(replay: object) -> None:
        raise error

    monkeypatch.setattr("spmd_rl.microscope.command.examine", failing)
    assert mismatch(run) == 3


def test_page_and_data_tell_what_was_replayed(run: Path, mismatch, capsys) -> None:
    assert mismatch(run, "--samples", "7:1") == 0
    data, page = replayed(run), (run / "mismatch" / "engine-trainer.html").read_text()
    assert data["sequences"] == [
        {
            "name": "7:1",
            "prompt_tokens": 6,
            "response_tokens": 4,
            "prompt": "15+29=",
            "response": "445<|end|>",
        }
    ]
    assert data["run"] == "demo"
    assert data["command"] == f"spmd-rl mismatch {run} --samples 7:1"
    for text in (
        "15+29=<b>445&lt;|end|&gt;</b>",
        html.escape(data["command"]),
        "with which the run ended",
    ):
        assert text in page
    assert "log-probs of its own draw: " in page
    assert "micro-batches: 1" in page
    capsys.readouterr()
    assert mismatch(run, "--prompts", "1+1=", "héllo€") == 0
    said = "prompt 2 does not survive the tokenizer: what is replayed reads 'hllo'."
    assert capsys.readouterr().out.splitlines()[0] == said
    assert replayed(run)["notes"] == [said]


def test_a_planted_fault_has_a_page_of_its_own(run: Path, mismatch) -> None:
    assert mismatch(run) == 0
    assert mismatch(run, "--plant", "norm-order") == 1
    assert replayed(run)["agree"] is True
    assert replayed(run, "engine-trainer.norm-order")["agree"] is False
    text = (run / "mismatch" / "engine-trainer.norm-order.json").read_text()
    assert len(text.splitlines()) < 150, "a finding is a line, and so is a token"


def test_unequal_tokens_are_listed_with_what_each_side_gives_them(
    run: Path, mismatch, capsys
) -> None:
    assert mismatch(run, "--plant", "logits-bf16") == 1
    data = replayed(run, "engine-trainer.logits-bf16")
    tokens = data["unequal_logprobs"]
    assert f"{len(tokens)} of 12 log-probs change" in capsys.readouterr().out
    assert tokens
    for one in tokens:
        assert one["left"] != one["right"]
        assert one["left"] == pytest.approx(one["right"], abs=0.05)
        assert (one["position"] - 5, one["recorded"]) == (one["response_token"], None)
        assert one["text"] in ("4", "5", "6", "7", "<|end|>")
    page = (run / "mismatch" / "engine-trainer.logits-bf16.html").read_text()
    assert f"{tokens[0]['left']:.9g}" in page
    assert "Log-probs that differ" in page


def test_a_run_that_broke_the_rules_does_not_agree(
    run: Path, mismatch, capsys, monkeypatch
) -> None:
    trouble = "At position 0, 7:1 reads position 0 of 7:0 in the cache: not its own history."
    monkeypatch.setattr(KvProvenance, "problems", [trouble])
    assert mismatch(run) == 1
    assert capsys.readouterr().out.startswith(trouble)
    assert (replayed(run)["agree"], replayed(run)["troubles"]) == (False, [trouble])
    assert "verdict parted" in (run / "mismatch" / "engine-trainer.html").read_text()


@pytest.mark.parametrize(("left", "right"), [("engine", "trainer"), ("trainer", "transformers")])
def test_nan_is_traced_to_where_it_begins(
    run: Path, mismatch, capsys, left: str, right: str
) -> None:
    poison(run / "hf", "model.layers.1.mlp.down_proj.weight", torch.nan)
    assert mismatch(run, "--left", left, "--right", right) == 1
    said = capsys.readouterr().out
    for name in (left, right):
        name = name if name == "transformers" else f"the {name}"
        assert re.search(
            rf"{name.capitalize()}: .* outputs are NaN at layer 1 down_proj, the first place", said
        )
    assert ("None of" not in said) and "by nan" not in said
    assert (left == "engine") or "All 12 log-probs are NaN." in said
    data = replayed(run, f"{left}-{right}")
    assert data["agree"] is False
    assert len(data["troubles"]) == 2


def test_an_infinite_weight_leaves_the_files_readable(run: Path, mismatch, capsys) -> None:
    poison(run / "hf", "model.layers.2.mlp.down_proj.weight", torch.inf)
    assert mismatch(run, "--right", "transformers") == 1
    assert "by nan" not in capsys.readouterr().out
    assert replayed(run, "engine-transformers")["findings"]


@pytest.mark.parametrize("same", [True, False])
def test_a_step_is_replayed_under_the_weights_that_drew_it(
    run: Path, folder: Path, mismatch, capsys, same: bool
) -> None:
    trained = load_model(folder, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        trained.model.norm.weight.mul_(1.1)
    settings = tomllib.loads((run / "config.toml").read_text())
    case = case_of_samples(find_samples(run), folder, settings)
    hashes = HashTap(case.num_rows)
    EnginePass(trained, NativeEngineConfig(page_size=4)).run(case, hashes)
    assert hashes.logprobs is not None
    file, told = run / "samples" / "step_00002.jsonl", []
    for number, line in enumerate(file.read_text().splitlines()[:3]):
        rows = case.offsets[number] + case.scored_positions(number)
        kept = {
            "logprobs": hashes.logprobs[torch.from_numpy(rows)].tolist(),
            "versions": [1 if same else 0] * len(rows),
        }
        told.append(json.dumps(json.loads(line) | kept) + "\n")
    file.write_text("".join(told))
    checkpoint(run / "checkpoints" / "step_000001", dict(trained.named_parameters()), version=1)
    assert mismatch(run, "--step", "2") == 0
    note, _, *rest = capsys.readouterr().out.splitlines()
    recorded = replayed(run)["recorded"]
    if same:
        assert note.startswith("Replayed under the weights that drew the samples, version 1, from ")
        assert (recorded["equal"], recorded["of"]) == (12, 12)
        assert (
            rest[0] == "Of the 12 log-probs recorded with the samples, the engine gives 12 again."
        )
        assert mismatch(run) == 0  # under the weights with which the run ended
        assert replayed(run)["recorded"]["says"].endswith("; --step 2 replays some that can.")
    else:
        assert note.endswith(
            "the samples were drawn by version 0, of which there is no checkpoint."
        )
        assert recorded["equal"] < 12
        assert recorded["says"] == (
            "The 12 log-probs recorded with the samples cannot be confirmed here: only the weights "
            "that drew them give them again, and others were replayed."
        )
        assert len(rest) == 1


def test_a_run_that_exported_nothing_says_so(run: Path, mismatch, capsys) -> None:
    shutil.rmtree(run / "hf")
    assert mismatch(run) == 2
    assert "name a model with --model" in capsys.readouterr().err


def test_a_run_with_attention_in_splits_is_replayed_without_where_they_cannot_run(
    run: Path, mismatch, capsys
) -> None:
    config = run / "config.toml"
    split = "attention_split = 128"
    config.write_text(
        config.read_text().replace("[engine]", f"[trainer]\n{split}\n[engine]\n{split}")
    )
    assert mismatch(run) == 0
    notice, sentence, _ = capsys.readouterr().out.splitlines()
    assert "attention_split needs FlashAttention-4" in notice
    assert "agree in every bit" in sentence


@pytest.mark.parametrize(
    ("recompute", "recomputes"), [("none", False), ("cheap", False), ("all", True)]
)
def test_the_trainers_head_is_the_one_that_the_run_has(
    folder: Path, recompute: str, recomputes: bool
) -> None:
    settings = {"trainer": {"backend": {"recompute": recompute}}}
    forward_pass = sides.forward_pass(
        "trainer", folder, torch.float32, torch.device("cpu"), settings
    )
    assert isinstance(forward_pass, TrainerPass)
    assert forward_pass.scorer.recomputes is recomputes


@pytest.mark.parametrize("fault", [None, "logits-bf16"])
def test_the_proof_compares_whole_rows_of_logits(
    run: Path, folder: Path, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def path(model: CausalLM, cfg: NativeEngineConfig) -> EnginePass:
        made = EnginePass(model, cfg)
        if fault:
            plant(fault, made)
        return made

    for name, value in {
        "DEVICE": torch.device("cpu"),
        "DTYPE": torch.float32,
        "EnginePass": path,
    }.items():
        monkeypatch.setattr(grpo_proof, name, value)
    logits, unequal = grpo_proof.replayed("demo", folder, run)
    assert (logits.value, logits.holds) == (4, False), "one sample's, fewer than the bar"
    assert unequal.holds is (fault is None)
    assert unequal.value == (8 if fault else 0), "its logits and its log-probs"


@pytest.mark.parametrize(
    ("right", "layers", "expected"),
    [
        ("trainer", "local", ["--right megatron replays it on one rank"]),
        ("megatron", "transformer_engine", ["transformer-engine's layers, whose bits are others"]),
        ("megatron", "local", []),
    ],
)
def test_a_run_of_megatron_core_is_told_what_layers_it_had(
    right: str, layers: str, expected: list[str]
) -> None:
    text = f'[trainer.backend]\nkind = "megatron"\nlayers = "{layers}"\n'
    options = parse_options(["runs/demo", "--left=engine", f"--right={right}"], None)
    notes = sides.megatron_notes(options, tomllib.loads(text))
    assert len(notes) == len(expected)
    assert all(part in note for part, note in zip(expected, notes, strict=True))
    assert sides.megatron_notes(options, {"trainer": {"backend": {"kind": "fsdp2"}}}) == []


def test_megatron_core_and_a_side_that_ran_elsewhere_are_refused() -> None:
    options = parse_options(["runs/demo", "--left=megatron", "--right=sglang"], None)
    with pytest.raises(SpmdError, match="both keep their weights to themselves"):
        check_sides(options)


def test_the_first_line_says_what_was_not_looked_at(run: Path, mismatch, capsys) -> None:
    config = run / "config.toml"
    config.write_text(
        f"{config.read_text()}top_p = 0.9\nreplay_filters = true\nreplay_routes = true\n"
        "[split.train]\ntp = 2\npp = 2\nfsdp = 0\n[trainer.backend]\nkind = 'megatron'\n"
        "[trainer.lora]\nrank = 4\n"
    )
    assert mismatch(run) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1] == (
        "Not looked at, so faults there cannot be seen: exchanges of the trainer's ranks, of which "
        "one replays all (pp 2, tp 2); Megatron-core, in whose place our trainer computes; "
        "adapters of the run, as the folder of its weights has none; kept sets of top_p, as both "
        "sides score over the whole vocabulary; recorded routes of experts, as each side chooses "
        "its own."
    )
    assert "agree in every bit" in said[2]
    assert len(replayed(run)["limits"]) == 5
    assert mismatch(run, "--left", "engine", "--right", "transformers") in (0, 1)
    assert "trainer" not in capsys.readouterr().out.split("cannot be seen")[1]


@pytest.fixture
def lora_run(run: Path, folder: Path) -> Path:
    """A run of adapters that change every projection, on the base in `folder`."""
    shutil.rmtree(run / "hf")
    lora = LoraConfig(rank=4, alpha=8.0)
    generator = torch.Generator().manual_seed(3)
    shapes = lora.shapes(read_spec(folder)).items()
    adapters = [(name, 0.1 * torch.randn(shape, generator=generator)) for name, shape in shapes]
    save_adapters(run / "hf", folder, lora, adapters)
    config = run / "config.toml"
    config.write_text(f"{config.read_text()}[trainer.lora]\nrank = 4\nalpha = 8.0\n")
    return run


def test_adapters_are_replayed_beside_their_base(
    lora_run: Path, folder: Path, mismatch, capsys
) -> None:
    assert mismatch(lora_run) == 0
    assert "agree in every bit" in capsys.readouterr().out
    assert f"adapters on {folder}" in replayed(lora_run)["weights"]
    assert mismatch(lora_run, "--right", "transformers") == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Transformers computes with the adapters merged into the weights."
    assert said[1].startswith("layer 0 q_proj: ")
    assert said[2].endswith("the contract's product.")
    data = replayed(lora_run, "engine-transformers")
    of_products = [one for one in data["causes"] if one["op"].endswith("_proj")]
    assert {one["right"]["arithmetic"][0].partition(":")[0] for one in of_products} <= {
        "the adapter merged into the weight",
        "the library's product, the adapter merged",
    }
    assert mismatch(lora_run, "--model", folder) == 0
    assert "adapters of the run, as the folder" in capsys.readouterr().out.splitlines()[0]


def test_an_engine_that_merged_adapters_is_replayed_with_them_merged(
    lora_run: Path, mismatch, capsys
) -> None:
    config = lora_run / "config.toml"
    config.write_text(f"{config.read_text()}merged_push = true\n")
    assert mismatch(lora_run) == 1
    said = capsys.readouterr().out
    assert said.startswith("The engine computes with the adapters merged into the weights.")
    assert "the adapter merged into the weight" in said


@pytest.mark.parametrize("weights", ["e4m3", "int4"])
def test_beside_transformers_codes_are_no_difference(
    run: Path, mismatch, capsys, weights: str
) -> None:
    formats = f'weights = "{weights}"\ncache = "e4m3"\n'
    config = run / "config.toml"
    config.write_text(
        config.read_text().replace("[engine]\n", f"[trainer]\n{formats}[engine]\n{formats}")
    )
    assert mismatch(run) == 0
    capsys.readouterr()
    assert mismatch(run, "--left", "engine", "--right", "transformers") == 1
    said = capsys.readouterr().out
    assert f"computes with what the {weights} codes of weights stand for" in said
    causes = replayed(run, "engine-transformers")["causes"]
    assert not [one["op"] for one in causes if not one["left"]["arithmetic"]]
    (attention,) = [one for one in causes if one["op"] == "attention"]
    assert "rounded to codes of 8 bits" in attention["left"]["arithmetic"][0]


def test_what_another_program_is_to_compute_with_has_no_adapters(
    lora_run: Path, mismatch, tmp_path: Path
) -> None:
    assert mismatch(lora_run, "--write-inputs", tmp_path / "inputs.json") == 0
    model = json.loads((tmp_path / "inputs.json").read_text())["model"]
    assert dict(read_weights(model)).keys() == read_spec(model).parameter_shapes().keys()


def test_torch_starts_no_threads_before_ranks_are_forked(
    run: Path, mismatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is forked from a process with threads would wait for them for ever."""
    seen: list[int] = []

    def replay(*_: object) -> list[Any]:
        seen.append(torch.get_num_threads())
        return []

    monkeypatch.setattr("spmd_rl.microscope.command._replay_ranks", replay)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert mismatch(run) == 0
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)

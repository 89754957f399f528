"""Models that transformers computes, in whole runs: its losses, its folders, no claim of bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from spmd_rl.model.foreign.names import NOT_COMPARED
from spmd_rl.model.tokenizer import load_tokenizer
from tests.dist.recipes.conftest import EXAMPLE, Ended, run_in
from tests.foreign_folders import write_foreign_folder
from tests.system import even

pytestmark = pytest.mark.dist

RECORDS = [("1+2=", "3"), ("10+20=", "30"), ("7+8=", "15"), ("35+36=", "71")]
PAIRS = (f"--data={EXAMPLE / 'pairs.jsonl'}", "--pairs_per_step=8", "--trainer.lr=1e-3")
GRPO = ("--steps=3", "--trainer.init=folder", "--sampling.max_tokens=6")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_foreign_folder(tmp_path_factory.mktemp("gemma3") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in RECORDS]
    file.write_text("\n".join(lines))
    return file


def sft(at: Path, model: str, data: Path, steps: int, *words: str, nproc: int = 1) -> Ended:
    """Run some steps, each over all records, so that their order does not matter.

    The run is called by their number.
    """
    settings = (f"--model={model}", f"--data={data}", f"--steps={steps}", "--pairs_per_step=4")
    rate = ("--trainer.lr=1e-2", *words)
    ended = run_in(at, "sft", *settings, *rate, nproc=nproc, small=False, name=f"{steps}-steps")
    assert ended.code == 0, ended.sentence
    return ended


@torch.no_grad()
def loss_of_transformers(folder: Path) -> float:
    """Return its mean loss of a token of the answers, one record at a time."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, losses = load_tokenizer(f"transformers:{folder}"), []
    for prompt, answer in RECORDS:
        first, second = tokenizer([prompt, answer])["input_ids"]
        answered = torch.tensor([*second, 1])
        logits = network(input_ids=torch.tensor([[*first, *second, 1]])).logits[0]
        losses.append(F.cross_entropy(logits[len(first) - 1 : -1], answered, reduction="none"))
    return float(torch.cat(losses).mean())


@pytest.mark.parametrize("words", [(), ("--trainer.backend.wrap=layer",)])
def test_ranks_have_the_losses_of_transformers_and_export_what_they_trained(
    words: tuple[str, ...], model: str, data: Path, tmp_path: Path
) -> None:
    long = sft(tmp_path, model, data, 2, *words, nproc=2)
    short = sft(tmp_path, model, data, 1)
    folders = Path(model.removeprefix("transformers:")), short.folder / "hf"
    expected = [loss_of_transformers(folder) for folder in folders]
    assert expected[1] < expected[0] - 0.1
    assert [row["train/loss"] for row in long.metrics] == pytest.approx(expected, abs=1e-5)
    assert short.metrics[0]["train/loss"] == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.parametrize("words", [(), ("--split.train.ranks=1", "--split.infer.ranks=1")])
def test_a_policy_learns_beside_its_engine_without_a_claim_of_equal_bits(
    words: tuple[str, ...], model: str, tmp_path: Path
) -> None:
    reward = f"--reward={even.__file__}:even"
    ended = run_in(tmp_path, "grpo", f"--model={model}", reward, *GRPO, *words, nproc=2)
    assert ended.code == 0, ended.sentence
    assert ended.output.count(NOT_COMPARED) == 1
    assert (ended.folder / "report.html").read_text().count(NOT_COMPARED) == 1
    for row in ended.metrics:
        assert not {"onpolicy/mismatched_tokens", "onpolicy/compared_tokens"} & row.keys()
        assert row["onpolicy/max_abs_dlogp"] < 1e-5
    assert any(row["train/grad_norm"] > 0 for row in ended.metrics)
    assert "mismatched" not in ended.output


def test_preferences_are_learned_and_go_on_after_a_checkpoint(model: str, tmp_path: Path) -> None:
    def dpo(name: str, steps: int, *words: str) -> Ended:
        settings = (f"--model={model}", *PAIRS, f"--steps={steps}", *words)
        ended = run_in(tmp_path, "dpo", *settings, nproc=2, small=False, name=name)
        assert ended.code == 0, ended.sentence
        return ended

    unbroken = dpo("unbroken", 4)
    dpo("resumed", 2)
    resumed = dpo("resumed", 4, "--run.resume=true")
    assert unbroken.metrics[0]["train/loss"] == pytest.approx(0.6931472)
    assert [row["train/loss"] for row in resumed.metrics] == pytest.approx(
        [row["train/loss"] for row in unbroken.metrics], abs=1e-6
    )

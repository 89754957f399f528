"""DPO, reward models, RLHF and distillation as whole runs on real ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from spmd_rl.model.hf import random_weights, save_folder
from spmd_rl.model.read import read_spec
from spmd_rl.observe.metrics_log import read_metrics
from tests.dist.recipes.conftest import EXAMPLE
from tests.dist.recipes.test_data_recipes import KEEP_ALL, forget_after

pytestmark = [pytest.mark.dist, pytest.mark.system]

PAIRS = [
    f"--data={EXAMPLE / 'pairs.jsonl'}",
    f"--eval.data={EXAMPLE / 'eval_pairs.jsonl'}@[:20]",
    "--pairs_per_step=6",
    "--eval.every=2",
    "--steps=3",
    "--trainer.lr=1e-3",
    "--trainer.max_tokens=32",
]
SAMPLES = [
    f"--data={EXAMPLE / 'train.jsonl'}",
    "--prompts_per_step=4",
    "--sampling.num_samples=4",
    "--sampling.max_tokens=4",
    "--steps=2",
    "--trainer.lr=1e-2",
]


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with random weights, which differ."""
    source = EXAMPLE / "model"
    folders = tmp_path / "model", tmp_path / "other"
    for seed, folder in enumerate(folders):
        save_folder(folder, source, random_weights(read_spec(source), seed))
    return folders


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "hf/model.safetensors")


def distances(folder: Path, other: Path) -> Iterator[float]:
    theirs = weights(other)
    return (float(np.abs(value - theirs[name]).max()) for name, value in weights(folder).items())


def test_dpo_on_one_rank_and_on_two(run: Any, models: tuple[Path, Path]) -> None:
    """The policy begins as the reference, so that the first loss is log 2."""
    words = ("dpo", f"--model={models[0]}", *PAIRS)
    one, two = (run(*words, nproc=n, name=f"on{n}", small=False) for n in (1, 2))
    for ended in (one, two):
        assert ended.code == 0, ended.sentence
        before, first, _, last = read_metrics(ended.folder / "metrics.jsonl")
        assert first["train/loss"] == pytest.approx(np.log(2), abs=1e-6)
        assert (first["dpo/margin"], first["dpo/accuracy"]) == (0, 0)
        assert last["train/loss"] < first["train/loss"]
        assert (before["eval/accuracy"], before["eval/margin"]) == (0.5, 0)
        assert "eval/accuracy" in last
    ends = [read_metrics(ended.folder / "metrics.jsonl")[3] for ended in (one, two)]
    for name in ("train/loss", "train/grad_norm", "dpo/margin", "eval/margin"):
        assert ends[0][name] == pytest.approx(ends[1][name], rel=1e-3)
    assert max(distances(one.folder, two.folder)) < 1e-4


def test_dpo_of_adapters_beside_their_base(run: Any, models: tuple[Path, Path]) -> None:
    """The margins are those beside a frozen reference, which a copy of the folder still is."""
    copied = shutil.copytree(models[0], models[0].parent / "copied")
    words = ("dpo", f"--model={models[0]}", "--trainer.lora.rank=4", *PAIRS)
    base = run(*words, name="base", small=False)
    frozen = run(*words, f"--reference={copied}", name="frozen", small=False)
    assert base.code == frozen.code == 0, (base.sentence, frozen.sentence)
    rows, expected = (read_metrics(one.folder / "metrics.jsonl")[1:] for one in (base, frozen))
    for name in ("train/loss", "dpo/margin"):
        assert [row[name] for row in rows] == [row[name] for row in expected]
    assert rows[0]["dpo/margin"] == 0 != rows[-1]["dpo/margin"]
    assert rows[-1]["eval/margin"] == expected[-1]["eval/margin"]


def test_dpo_with_another_reference(run: Any, models: tuple[Path, Path]) -> None:
    words = (f"--model={models[0]}", f"--reference={models[1]}", *PAIRS)
    ended = run("dpo", *words, small=False)
    assert ended.code == 0, ended.sentence
    assert abs(ended.metrics[0]["dpo/margin"]) > 1e-3


def test_a_reward_model_resumes_and_judges(run: Any, models: tuple[Path, Path]) -> None:
    words = ("reward_model", f"--model={models[0]}", *PAIRS, *KEEP_ALL)
    whole = run(*words, nproc=2, name="rm", small=False)
    assert whole.code == 0, whole.sentence
    rows = read_metrics(whole.folder / "metrics.jsonl")
    assert rows[1]["train/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert rows[3]["train/loss"] != rows[2]["train/loss"]
    config = json.loads((whole.folder / "hf/config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    learned = weights(whole.folder)
    forget_after(whole.folder, 1)
    shutil.rmtree(whole.folder / "hf")
    assert run(*words, nproc=2, name="rm", small=False).code == 0
    again = weights(whole.folder)
    assert all((again[name] == learned[name]).all() for name in learned)

    judge = f"--reward_model={whole.folder / 'hf'}"
    held_out = f"--eval.data={EXAMPLE / 'eval.jsonl'}@[:9]"
    judged = run("rlhf", f"--model={models[0]}", judge, *SAMPLES, held_out, nproc=2, small=False)
    assert judged.code == 0, judged.sentence
    evaluated = read_metrics(judged.folder / "metrics.jsonl")
    assert ["eval/reward" in row for row in evaluated] == [True, False, True]
    assert evaluated[0]["eval/reward"] != 0
    rewards = [row["reward"] for row in judged.samples(1)]
    assert len(set(rewards)) > 8
    assert np.mean(rewards) == pytest.approx(judged.metrics[0]["reward/mean"])
    assert judged.metrics[0]["train/grad_norm"] > 0
    assert judged.metrics[1]["onpolicy/mismatched_tokens"] == 0
    words = (f"--model={models[0]}", judge, *SAMPLES, "--trainer.lora.rank=4")
    adapted = run("rlhf", *words, name="adapted", small=False)
    assert adapted.code == 0, adapted.sentence
    assert adapted.metrics[1]["onpolicy/mismatched_tokens"] == 0

    refused = run(
        "rlhf",
        f"--model={models[0]}",
        f"--reward_model={models[1]}",
        *SAMPLES,
        name="no",
        small=False,
    )
    assert refused.code == 2
    assert "is no reward model" in refused.sentence


@pytest.mark.parametrize(("form", "rank"), [("sampled", 0), ("topk", 0), ("topk", 4)])
def test_distillation(run: Any, models: tuple[Path, Path], form: str, rank: int) -> None:
    words = (f"--model={models[0]}", f"--teacher={models[1]}", f"--form={form}", "--top_k=5")
    words += (f"--trainer.lora.rank={rank}",)
    ended = run("distill", *words, *SAMPLES, nproc=2, small=False)
    assert ended.code == 0, ended.sentence
    first = ended.metrics[0]
    assert first["distill/kl"] > 0
    assert first["reward/mean"] == pytest.approx(-first["distill/kl"], rel=0.5)
    assert first["onpolicy/mismatched_tokens"] == 0
    assert first["train/grad_norm"] > 0
    assert (first.get("distill/topk_kl", 0) > 0) == (form == "topk")


def test_the_teacher_of_itself_teaches_nothing(run: Any, models: tuple[Path, Path]) -> None:
    words = (f"--model={models[0]}", f"--teacher={models[0]}")
    ended = run("distill", *words, *SAMPLES, "--steps=1", small=False)
    assert ended.code == 0, ended.sentence
    assert ended.metrics[0]["distill/kl"] == 0
    assert ended.metrics[0]["train/grad_norm"] == 0


def test_a_teacher_with_other_tokens_is_refused(run: Any, models: tuple[Path, Path]) -> None:
    file = models[1] / "tokenizer.json"
    file.write_text(file.read_text().replace('"7":', '"¤":'))
    words = (f"--model={models[0]}", f"--teacher={models[1]}")
    ended = run("distill", *words, *SAMPLES, small=False)
    assert ended.code == 2
    assert "has another tokenizer than the model" in ended.sentence

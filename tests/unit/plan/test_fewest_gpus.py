"""The least number of GPUs for models of which the sums are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import config
from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.plan import main

H200 = "139.8"  # GiB that CUDA reports of its 141 GB
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": config("0.6B"),
    "8B": config("8B"),
    "32B": config("8B")
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "70B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, shape in SHAPES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(shape))
    return folder


def asked(model: Path, *words: str) -> list[str]:
    return ["grpo", "--fewest-gpus", f"--model={model}", "--data=x.jsonl", *words]


def said(capsys: pytest.CaptureFixture[str], words: list[str]) -> list[str]:
    assert main(words) == 0
    return capsys.readouterr().out.splitlines()


def test_a_small_model_fits_one_gpu_as_it_is(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, asked(models / "0.6B", f"--gpu-gib={H200}"))
    assert out[0] == "     1 GPU  fits: --nproc 1"
    assert any(line.startswith("sleep        nothing sleeps: all roles awake need") for line in out)


def test_32b_has_an_answer_on_8_gpus(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, asked(models / "32B", f"--gpu-gib={H200}"))
    tried = [line.split()[0] for line in out[: out.index("")]]
    assert tried == ["1", "2", "4"]
    assert "no: rank 0: phase" in out[0]
    assert out[2].split("fits: ")[1] == (
        "--nproc 4 --trainer.backend.offload=moments --trainer.backend.recompute=all"
    )
    on_gpu = ["--trainer.backend.offload=none", "--host-gib=600"]
    out = said(capsys, asked(models / "32B", f"--gpu-gib={H200}", *on_gpu))
    fits = out[out.index("") - 1]
    assert fits.split("fits: ")[1] == "--nproc 8 --trainer.backend.recompute=all"


def test_the_flags_that_are_printed_fit(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, asked(models / "8B", "--gpu-gib=79.1"))
    flags = next(line for line in out if "fits: " in line).split("fits: ")[1].split()
    words = ["grpo", f"--model={models / '8B'}", "--data=x.jsonl", "--gpu-gib=79.1", *flags]
    assert main(words) == 0
    assert "fits in 79.1 GiB" in capsys.readouterr().out


def test_70b_does_not_fit_because_engines_have_whole_copies(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PlanError) as refused:
        main(asked(models / "70B", f"--gpu-gib={H200}"))
    assert "more GPUs do not divide weights 131.4 GiB" in str(refused.value)
    assert str(refused.value).startswith("no number of GPUs suffices: on ")
    assert str(refused.value).endswith(
        "each GPU of an engine has a whole copy of the weights, so this model needs larger GPUs, "
        "or an engine that divides its weights over several GPUs (tensor parallelism), which is "
        "not built"
    )
    assert capsys.readouterr().out.count("  no: ") >= 2


def test_settings_of_the_run_stay_as_they_are(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpu-gib=79.1", "--trainer.backend.recompute=none", "--trainer.max_tokens=2048"]
    out = said(capsys, asked(models / "8B", *words))
    fits = next(line for line in out if "fits: " in line)
    assert "recompute=all" not in fits.split("fits: ")[1]
    never = [*words, "--offload.sleep=never"]
    more = said(capsys, asked(models / "8B", *never))
    assert len(more[: more.index("")]) >= len(out[: out.index("")])


def test_host_memory_excludes_too(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, asked(models / "8B", "--gpu-gib=79.1", "--host-gib=60"))
    assert "fits: --nproc 1" not in out[0]


def test_a_recipe_without_an_engine(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sft", "--fewest-gpus", f"--model={models / '8B'}", "--data=x.jsonl"]
    out = said(capsys, [*words, "--gpu-gib=79.1"])
    assert any("fits: --nproc" in line for line in out)


def test_the_memory_of_a_gpu_is_needed(models: Path) -> None:
    with pytest.raises(ConfigError, match="--fewest-gpus needs --gpu-gib G"):
        main(asked(models / "8B"))

"""The least number of GPUs for models of which the sums are known."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import config
from spmd_rl.config.load import load
from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.plan import fewest_gpus, main
from spmd_rl.plan.resolve import RunPlan, resolve
from spmd_rl.plan.savings import key_of, layouts
from spmd_rl.recipes.grpo import Config
from tests.unit.plan.test_megatron import QWEN3_30B_A3B

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
    "30B-A3B": QWEN3_30B_A3B,
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
    assert tried == ["1", "2", "4", "which"]
    assert "no: rank 0: phase" in out[0]
    assert out[2].split("fits: ")[1] == (
        "--nproc 4 --trainer.backend.offload=moments --trainer.backend.recompute=all"
    )
    assert out[3] == (
        "            which costs: each step copies the moments to the GPU and back; "
        "33% more operations in a train step"
    )
    on_gpu = ["--trainer.backend.offload=none", "--host-gib=600"]
    out = said(capsys, asked(models / "32B", f"--gpu-gib={H200}", *on_gpu))
    fits = out[out.index("") - 2]
    assert fits.split("fits: ")[1] == (
        "--nproc 8 --trainer.backend.recompute=cheap --trainer.max_tokens=4096"
    )


def test_the_flags_that_are_printed_fit(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, asked(models / "8B", "--gpu-gib=79.1"))
    flags = next(line for line in out if "fits: " in line).split("fits: ")[1].split()
    words = ["grpo", f"--model={models / '8B'}", "--data=x.jsonl", "--gpu-gib=79.1", *flags]
    assert main(words) == 0
    assert "fits in 79.1 GiB" in capsys.readouterr().out


def test_70b_needs_an_engine_that_divides_its_weights(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(capsys, asked(models / "70B", f"--gpu-gib={H200}"))
    fits = next(line for line in found if "fits: " in line)
    assert "--split.infer.tp=" in fits
    assert "sglang" not in fits
    with pytest.raises(PlanError) as refused:
        main(asked(models / "70B", f"--gpu-gib={H200}", "--split.infer.tp=1"))
    assert "more GPUs do not divide weights 131.4 GiB" in str(refused.value)
    assert str(refused.value).startswith("no number of GPUs suffices: on ")
    assert str(refused.value).endswith(
        "each GPU has a whole copy of an engine's weights, which split.infer.tp divides over "
        "several"
    )
    assert capsys.readouterr().out.count("  no: ") >= 2


@pytest.mark.parametrize(
    ("name", "words", "layout"),
    [
        ("32B", ["grpo"], "--split.infer.tp="),
        ("30B-A3B", ["sft", "--trainer.backend.kind=megatron"], "--split.train.ep="),
    ],
)
def test_a_layout_that_fits_80_gb_is_found_and_its_flags_fit(
    models: Path, capsys: pytest.CaptureFixture[str], name: str, words: list[str], layout: str
) -> None:
    given = [f"--model={models / name}", "--data=x.jsonl", "--gpu-gib=79.1"]
    out = said(capsys, [*words, *given, "--fewest-gpus"])
    fits = out[out.index("") - 2].split("fits: ")[1]
    assert fits.startswith(f"--nproc 8 {layout}")
    assert main([*words, *given, *fits.split()]) == 0
    assert "fits in 79.1 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        ((), "--split.infer.tp=8 --split.train.tp=8"),
        (("--run.exact=false",), "--split.infer.tp=8 --split.train.tp=8"),
        (
            ("--trainer.backend.layers=transformer_engine",),
            "--engine.kind=sglang --run.exact=false --split.infer.tp=4 --split.train.tp=8 "
            "--trainer.backend.sequence_parallel=true",
        ),
    ],
)
def test_megatron_shares_matrices_with_the_bits_that_a_run_needs(
    models: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], layout: str
) -> None:
    recompute = ("granularity=full", "method=uniform", "num_layers=1")
    saved = [f"--trainer.backend.model_options.recompute_{one}" for one in recompute]
    saved += ["--trainer.backend.kind=megatron", "--trainer.backend.offload=moments"]
    given = [*saved, "--trainer.max_tokens=4096", "--gpu-gib=79.1", "--world=8", *words]
    out = said(capsys, asked(models / "32B", *given))
    assert out[0] == f"    8 GPUs  fits: --nproc 8 {layout}"


def test_answers_too_long_for_a_rank_are_shared(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpu-gib=79.1", "--world=4", "--trainer.backend.recompute=all"]
    words += [f"--trainer.backend.{one}" for one in ("offload=none", "offload_activations=false")]
    words += ["--sampling.max_tokens=65536"]
    out = said(capsys, asked(models / "8B", *words))
    assert out[0] == "    4 GPUs  fits: --nproc 4 --split.train.cp=2"
    whole = [f"--split.train.{axis}=1" for axis in ("cp", "tp")]
    with pytest.raises(PlanError, match="4 GPUs do not suffice: each needs 89"):
        main(asked(models / "8B", *words, *whole))


def test_sequences_and_matrices_are_shared_at_once_after_each_alone() -> None:
    cp, tp = (f"--split.train.{axis}=2" for axis in ("cp", "tp"))
    found = layouts((), 4)
    for engine in ((), ("--split.infer.tp=2",)):
        alone, both = [found.index((*engine, one)) for one in (cp, tp)], (*engine, cp, tp)
        assert found.index(both) > max(alone)
    largest = [one for one in found if cp.replace("2", "4") in one and tp in one]
    assert not largest, "four ranks cannot be eight"
    assert (cp, tp) not in layouts((), 2)
    assert (tp,) in layouts((key_of(cp),), 4)
    assert all(cp not in one for one in layouts((key_of(cp),), 4))


def test_the_settings_for_the_gpus_that_there_are(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, asked(models / "8B", "--gpu-gib=79.1", "--world=8"))
    assert out[0] == "    8 GPUs  fits: --nproc 8 --trainer.max_tokens=8192"
    assert out[1] == "            which costs: no operations, but more micro-batches"
    assert out[2] == ""
    assert "world of 8" in out
    with pytest.raises(PlanError, match="1 GPU do not suffice: each needs .*; without --world, mo"):
        main(asked(models / "32B", "--gpu-gib=79.1", "--world=1"))


def test_a_plan_that_does_not_fit_names_the_setting_that_helps(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["grpo", f"--model={models / '8B'}", "--data=x.jsonl", "--gpu-gib=79.1"]
    with pytest.raises(
        PlanError,
        match=r"there are 79\.10 GiB; it fits with --trainer\.max_tokens=8192, which costs: no op",
    ):
        main([*words, "--world=8"])
    with pytest.raises(PlanError, match=r"recompute=cheap --.*=4096, which costs: elementwise op"):
        main([*words, "--world=8", "--gpu-gib=45"])
    kept = "--trainer.max_tokens=16384"
    with pytest.raises(PlanError, match=r"recompute=all, which costs: 33% more operations"):
        main([*words, "--world=8", kept])
    assert "activations " in capsys.readouterr().out
    with pytest.raises(PlanError, match="no settings of the plan save enough: --fewest-gpus finds"):
        main([*words[:1], f"--model={models / '32B'}", *words[2:], "--world=1"])


@pytest.mark.parametrize("world", ["64", "256", "1024"])
def test_large_worlds_of_shared_ranks_fit(
    models: Path, capsys: pytest.CaptureFixture[str], world: str
) -> None:
    """A rank's connections are those to its host's ranks, and buffers for all others together."""
    words = ["--gpu-gib=79.1", f"--world={world}", "--trainer.max_tokens=8192"]
    out = said(capsys, ["grpo", f"--model={models / '8B'}", "--data=x.jsonl", *words])
    assert out[-1] == "fits in 79.1 GiB"
    (line,) = [line for line in out if line.startswith("  communicators ")]
    assert all(float(size) < 4 for size in line.split()[1::2])


def test_sequences_that_find_no_room_are_counted(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 prompts of 8 samples of 32k tokens are asked for. A token has 2 x 64 x 8 x 128 x 2 bytes
    of keys and values, and a sequence 8.25 GiB.
    """
    long = ["--prompts_per_step=64", "--sampling.max_tokens=32768"]
    out = said(capsys, asked(models / "32B", f"--gpu-gib={H200}", *long))
    summary = out[: out.index("")]
    fits = next(line for line in summary if "fits: " in line)
    world = int(fits.split()[0])
    waits = summary[summary.index(fits) + 2].strip()
    kv = float(next(line for line in out if line.startswith("  kv ")).split("GiB")[0].split()[-1])
    each, held = 512 // world, int(kv / 8.25)
    assert waits == (
        f"{each - held} of the {each} sequences that a step asks of an engine wait: "
        f"its pages hold {held} at once, of 33,792 tokens each, so they take "
        f"{-(-each // held)} waves"
    )
    assert f"waiting      {waits}" in out
    (more,) = [line for line in summary if "no sequence waits: --nproc " in line]
    assert int(more.split()[0]) > world


def test_a_terminal_shows_what_is_tried(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = asked(models / "8B", "--gpu-gib=20", "--world=2")
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shown=is_terminal: shown)
        with pytest.raises(PlanError, match="2 GPUs do not suffice"):
            main(words)
        shown = capsys.readouterr().err
        assert ("trying 2 GPUs --split.infer.tp=2 --split.train.tp=2" in shown) is is_terminal
        assert "\n" not in shown


def test_a_search_tries_few_plans(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan takes milliseconds. The worlds have 11 and 8 sizes, of up to 62 layouts each."""
    tried: list[int] = []

    def count(cfg: object, world_size: int, *args: Any, **others: Any) -> RunPlan:
        tried.append(world_size)
        return resolve(cfg, world_size, *args, **others)

    monkeypatch.setattr(fewest_gpus, "resolve", count)
    long = ["--prompts_per_step=64", "--sampling.num_samples=8", "--sampling.max_tokens=32768"]
    said(capsys, asked(models / "32B", "--gpu-gib=79.1", *long))
    assert len(tried) < 2000
    tried.clear()
    with pytest.raises(PlanError, match="no settings of the plan save enough"):
        main(["grpo", f"--model={models / '32B'}", "--gpu-gib=20", "--data=x", "--world=1024"])
    assert 100 < len(tried) < 500


def test_an_engine_over_more_of_the_same_gpus_has_room(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that share an engine have a part of the weights each, and more pages."""
    asks = ["--prompts_per_step=4", "--sampling.num_samples=10", "--sampling.max_tokens=32768"]
    asks += [f"--gpu-gib={H200}", "--world=4"]
    out = said(capsys, asked(models / "32B", *asks))
    assert "6 at once, of 33,792 tokens each, so they take 2 waves" in out[2]
    assert out[3].startswith("    4 GPUs  no sequence waits: --nproc 4 --split.infer.tp=2 ")
    flags = out[3].split("waits: ")[1].split()
    words = ["grpo", f"--model={models / '32B'}", "--data=x.jsonl", *asks[:4], *flags]
    assert not any(line.startswith("waiting ") for line in said(capsys, words))


def test_a_batch_that_is_too_small_for_a_step_is_counted(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompts_per_step=64", "--engine.max_batch=32", f"--gpu-gib={H200}"]
    given = ["grpo", f"--model={models / '0.6B'}", "--data=x.jsonl", "--world=2"]
    assert (
        "waiting      224 of the 256 sequences that a step asks of an engine wait: "
        "engine.max_batch lets run 32 at once, of 1,152 tokens each, so they take 8 waves"
    ) in said(capsys, [*given, *words])
    out = said(capsys, asked(models / "0.6B", *words, "--world=2"))
    assert out[1] == ""


def test_ranks_that_share_an_engine_share_its_keys_and_values(models: Path) -> None:
    """Two ranks hold half of the heads each, and run the samples of twice as many prompts."""
    given = [f"model={models / '8B'}", "data=x", "engine.kind=sglang", "run.exact=false"]
    one, two = (
        resolve(load(Config, None, [*given, f"split.infer.tp={tp}"]), 8, 80 << 30) for tp in (1, 2)
    )
    assert one.queue is not None and two.queue is not None
    assert two.queue.num_asked == 2 * one.queue.num_asked
    kv = [
        next(entry.num_bytes for entry in plan.ledgers[0].entries if entry.tag == "kv")
        for plan in (one, two)
    ]
    of_a_sequence = [
        size / plan.queue.num_held
        for size, plan in zip(kv, (one, two), strict=True)
        if plan.queue is not None
    ]
    assert of_a_sequence[0] == pytest.approx(2 * of_a_sequence[1], rel=0.05)


def test_the_size_that_a_gpu_is_sold_by_is_no_room(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sold = "; a GPU that is sold as 80 GB has 79.1 GiB for CUDA"
    out = said(capsys, asked(models / "0.6B", "--gpu-gib=80"))
    assert f"            counted for GPUs of 80 GiB{sold}" in out
    words = ["grpo", f"--model={models / '0.6B'}", "--data=x.jsonl", "--world=1"]
    assert said(capsys, [*words, "--gpu-gib=80"])[-1] == f"fits in 80 GiB{sold}"
    assert said(capsys, [*words, "--gpu-gib=79.1"])[-1] == "fits in 79.1 GiB"


def test_settings_of_a_file_stay_as_they_are(
    models: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[trainer.backend]\nrecompute = 'none'\n[trainer]\nmax_tokens = 2048\n")
    out = said(capsys, asked(models / "8B", "--gpu-gib=79.1", f"--config={file}", "--world=8"))
    assert "recompute=all" not in out[0]
    assert "max_tokens" not in out[0]


def test_worlds_that_a_split_does_not_fit_are_passed_over(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = ["--split.train.ranks=4", "--split.infer.ranks=4"]
    out = said(capsys, asked(models / "8B", "--gpu-gib=79.1", *split))
    assert out[0].startswith("     1 GPU  no: the split asks for 8 ranks (train 4, infer 4)")
    assert "    8 GPUs  fits: --nproc 8" in out[3]
    with pytest.raises(PlanError, match="the split asks for 8 ranks"):
        main(asked(models / "8B", "--gpu-gib=79.1", *split, "--world=2"))


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


def test_the_memory_of_a_gpu_is_needed(models: Path) -> None:
    with pytest.raises(ConfigError, match="--fewest-gpus needs --gpu-gib G"):
        main(asked(models / "8B"))

"""Plans for worlds of any size, against sizes worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.shapes import config
from spmd_rl.config.load import load
from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.mesh.split import Split
from spmd_rl.offload.ledger import Ledger, as_size
from spmd_rl.offload.phases import COLOCATED
from spmd_rl.plan import main
from spmd_rl.plan.push import Push
from spmd_rl.plan.resolve import RunPlan, resolve
from spmd_rl.plan.text import lines
from spmd_rl.recipes.grpo import Config
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.train.config import TrainerConfig

QWEN3_8B = config("8B")
PARAMETERS = 8_190_735_360
BF16 = ("trainer.dtype=bfloat16", "engine.dtype=bfloat16")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return tmp_path


def planned(model: Path, world_size: int, *words: str) -> RunPlan:
    return resolve(load(Config, None, [f"model={model}", "data=none.jsonl", *words]), world_size)


def _bytes(ledger: Ledger) -> dict[str, int]:
    return {entry.tag: entry.num_bytes for entry in ledger.entries}


@pytest.mark.parametrize(
    ("word", "whole"),
    [("split.train.dp=1", False), ("split.train.dp=2", True), ("trainer.backend.wrap=model", True)],
    ids=["layer by layer", "without shards", "as one"],
)
def test_what_is_gathered(model: Path, word: str, whole: bool) -> None:
    layer = 4096 * (128 * (32 + 2 * 8) + 32 * 128 + 3 * 12288) + 2 * 4096 + 2 * 128
    gathered = _bytes(planned(model, 2, "trainer.dtype=bfloat16", word).ledgers[0])["gathered"]
    assert gathered == 2 * (PARAMETERS if whole else PARAMETERS - 34 * layer)


def test_eight_billion_split_four_and_four(model: Path) -> None:
    found = planned(
        model,
        8,
        "split.train.ranks=4",
        "split.infer.ranks=4",
        "engine.dtype=bfloat16",
        "engine.num_pages=100",
    )
    assert found.spec is not None
    assert found.spec.num_parameters == PARAMETERS
    assert found.push is not None
    assert found.push.copy_bytes == 2 * PARAMETERS
    assert [found.push.num_sends(rank) for rank in range(8)] == [4] * 4 + [0] * 4
    assert [found.push.num_receives(rank) for rank in range(8)] == [0] * 4 + [4] * 4
    assert found.groups == [
        ("train.fsdp", (0, 1, 2, 3)),
        ("infer.fsdp", (4, 5, 6, 7)),
        ("link", tuple(range(8))),
    ]
    train, infer = found.ledgers[0], found.ledgers[7]
    assert _bytes(train)["moments"] == 2 * PARAMETERS
    kept = _bytes(infer)
    assert (kept["weights"], kept["kv"]) == (PARAMETERS * 2, 100 * 128 * 2 * 36 * 8 * 128 * 2)
    assert infer.resident_bytes("train") > kept["weights"] + kept["kv"], (
        "an engine with ranks of its own never sleeps"
    )


@pytest.mark.parametrize("num_shards", [1, 4])
def test_moments_of_each_optimizer(model: Path, num_shards: int) -> None:
    rest = 2 * 151936 * 4096 + 36 * (2 * 4096 + 2 * 128) + 4096
    matrices = PARAMETERS - rest
    found = {}
    for kind in ("adamw", "muon", "adamw8bit"):
        words = (f"split.train.fsdp={num_shards}", f"trainer.optimizer.kind={kind}")
        found[kind] = _bytes(planned(model, num_shards, *words).ledgers[0])["moments"]
    assert found["adamw"] == 8 * PARAMETERS // num_shards
    assert found["muon"] == (8 * rest + 4 * matrices) // num_shards
    bits = 2 * PARAMETERS / num_shards * (1 + 4 / 256)
    assert bits <= found["adamw8bit"] < 1.001 * bits, "but for norms, which are small"


def test_frozen_parameters_have_no_gradients_or_moments(model: Path) -> None:
    words = ('trainer.freeze=["model.*"]', "engine.num_pages=100")
    entries = _bytes(planned(model, 1, *words).ledgers[0])
    head = 151936 * 4096
    assert (entries["moments"], entries["grads"]) == (8 * head, 4 * head)
    assert entries["master"] == 4 * PARAMETERS


def test_muon_sends_rows_to_each_peer(model: Path) -> None:
    words = ("engine.dtype=bfloat16", "engine.num_pages=100")
    plain, muon = (
        _bytes(planned(model, 2, *words, f"trainer.optimizer.kind={kind}").ledgers[0])
        for kind in ("adamw", "muon")
    )
    assert muon["communicators"] - plain["communicators"] == 32 * 12 << 20


@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_ranks_that_share_tokens_or_matrices_send_rows_to_each_other(
    model: Path, axis: str
) -> None:
    """Beside the ring in which they sum gradients, and the communicator of their axis."""
    words = ("engine.dtype=bfloat16", "engine.num_pages=100")
    two, four = (
        _bytes(planned(model, size, *words, f"split.train.{axis}={size}").ledgers[0])
        for size in (2, 4)
    )
    pushed = four["communicators"] - two["communicators"]
    assert pushed == 2 * 2 * 32 * 12 << 20, "of the axis and of a push, two more peers each"


def test_communicators_of_two_ranks_that_share_roles(model: Path) -> None:
    """One of seven sums gradients in a ring of 24 channels, another carries pushes over the 32 to
    the other rank.
    """
    words = ("engine.dtype=bfloat16", "engine.num_pages=100")
    ledger = planned(model, 2, *words).ledgers[0]
    bytes_of = {entry.tag: entry.num_bytes for entry in ledger.entries}
    assert bytes_of["communicators"] == (170 + 250 + 7 * 196 + (24 + 32) * 12) << 20
    assert bytes_of["buckets"] == 2 * 256 << 20
    ordered = planned(model, 2, *words, "trainer.deterministic=true").ledgers[0]
    assert ordered.peak_bytes() - ledger.peak_bytes() == 32 * 12 << 20, "gradients go to each peer"


def test_a_rank_alone_connects_to_nobody(model: Path) -> None:
    entries = planned(model, 1, "engine.dtype=bfloat16").ledgers[0].entries
    bytes_of = {entry.tag: entry.num_bytes for entry in entries}
    assert bytes_of["communicators"] == (170 + 4 * 196) << 20
    assert bytes_of["buckets"] == 0


def test_a_cpu_has_no_communicators(model: Path) -> None:
    words = ("trainer.dtype=float32", "engine.dtype=float32")
    assert not {"context", "communicators"} & {
        entry.tag for entry in planned(model, 2, *words).ledgers[0].entries
    }


def test_what_is_left_open_is_planned_for_gpus(model: Path) -> None:
    said = planned(model, 2, "trainer.dtype=bfloat16", "engine.dtype=bfloat16")
    left = planned(model, 2)
    assert left.ledgers == said.ledgers
    assert left.push == said.push is not None


def test_refusal_names_rank_phase_and_sum(model: Path) -> None:
    found = planned(model, 8, "engine.dtype=bfloat16", "engine.num_pages=125")
    found.require(200 << 30)
    with pytest.raises(
        PlanError,
        match=r"rank 0: phase sync needs master .* \+ weights .* = .* and there are 24\.00 GiB",
    ):
        found.require(24 << 30)


def test_replicated_trainer_has_groups_of_both_kinds(model: Path) -> None:
    found = planned(model, 4, "split.train.dp=2", "split.train.fsdp=2")
    assert found.groups[:4] == [
        ("train.fsdp", (0, 1)),
        ("train.fsdp", (2, 3)),
        ("train.dp", (0, 2)),
        ("train.dp", (1, 3)),
    ]


def test_command(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "grpo",
        "--world",
        "64",
        f"--model={model}",
        "--data=x.jsonl",
        "--engine.dtype=bfloat16",
    ]
    assert main([*words, "--gpu-gib", "4000"]) == 0
    out = capsys.readouterr().out
    assert "world of 64" in out
    assert "8,190,735,360 parameters" in out
    assert "15.26 GiB to each engine; a rank sends to 63 others at most" in out
    assert "fits in 4000 GiB" in out
    with pytest.raises(PlanError, match="needs"):
        main([*words, "--gpu-gib", "80"])
    with pytest.raises(ConfigError, match="--gpu-gib=nan: expected more than 0"):
        main([*words, "--gpu-gib", "nan"])
    for number in ("0", "-1", "1000000000"):
        with pytest.raises(
            ConfigError, match=f"a world of {number} ranks: set --world to a number from 1 to 8192"
        ):
            main(["grpo", "--world", number, f"--model={model}", "--data=x.jsonl"])


def test_the_words_of_a_run_are_planned_as_they_are(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["grpo", f"--model={model}", "--data=x.jsonl", "--nproc", "4"]
    assert main(words) == 0
    assert "world of 4\n" in capsys.readouterr().out
    assert main([*words, "--world", "8"]) == 0
    assert "world of 8\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="set --world to a number"):
        main(words[:3])


@pytest.mark.parametrize(("dtype", "on_gpu"), [("auto", True), ("float32", False)])
def test_it_is_said_where_memory_is_that_of_gpus(
    model: Path, capsys: pytest.CaptureFixture[str], dtype: str, on_gpu: bool
) -> None:
    words = ["grpo", f"--model={model}", "--data=x.jsonl", "--world=2"]
    assert main([*words, f"--trainer.dtype={dtype}", f"--engine.dtype={dtype}"]) == 0
    out = capsys.readouterr().out
    assert ("planned as for GPUs" in out) is on_gpu
    assert ("  context " in out) is on_gpu


def test_a_plan_without_a_model_says_which_words_are_missing() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^model is required: say --model VALUE \(a string\); teacher is required: say",
    ):
        main(["distill", "--world=2"])


def test_the_length_that_is_planned_for_is_said(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--sampling.max_tokens=3000", "--prompts.max_prompt_tokens=500"]
    batch = "--trainer.max_tokens=9000"
    assert main(["grpo", "--world=2", f"--model={model}", *lengths, batch]) == 0
    assert (
        "lengths      sequences of 3,500 tokens, of which sampling.max_tokens are answers; "
        "micro-batches of 9,000 (trainer.max_tokens)\n"
    ) in capsys.readouterr().out
    assert main(["sft", "--world=2", f"--model={model}", batch]) == 0
    assert "lengths      micro-batches of 9,000 (trainer.max_tokens)\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.9766 KiB"),
        (1024, "1.000 KiB"),
        (int(999.4 * 1024), "999.4 KiB"),
        (int(999.6 * 1024), "0.9762 MiB"),
        (int(4.3756 * 2**30), "4.376 GiB"),
        (15_624 << 30, "15,624 GiB"),
    ],
)
def test_sizes_have_four_digits(num_bytes: int, text: str) -> None:
    assert as_size(num_bytes) == text


def memory(found: RunPlan) -> dict[str, dict[str, list[str]]]:
    """The tables of memory as they are printed: title, entry, cells of the phases."""
    tables: dict[str, dict[str, list[str]]] = {}
    table: dict[str, list[str]] = {}
    for line in lines(found):
        if line.startswith("trainer.backend.recompute"):
            break
        if line.startswith("memory of"):
            title, _, phases = line.partition("  ")
            assert phases.split() == list(COLOCATED.names)
            table = tables[title] = {}
        elif tables and line.startswith("  ") and not line.startswith("   "):
            cells = line[42:]
            table[line[:42].strip()] = [cells[i : i + 12].strip() for i in range(0, 48, 12)]
    return tables


def test_memory_of_each_role_on_ranks_of_its_own(model: Path) -> None:
    """The trainer's is told beside an engine that needs more, and an engine's beside a trainer that
    does.
    """
    words = ("split.train.ranks=4", "split.infer.ranks=4", "engine.dtype=bfloat16")
    for pages in (1, 10_000):
        found = planned(model, 8, *words, f"engine.num_pages={pages}")
        tables = memory(found)
        assert list(tables) == [
            "memory of train, most on rank 0",
            "memory of infer, most on rank 4",
        ]
        train, infer = tables.values()
        assert train["master"] == [as_size(PARAMETERS)] * 4
        assert train["grads"] == ["-", "-", "-", as_size(PARAMETERS)]
        assert infer["weights"] == [as_size(2 * PARAMETERS)] * 4
        assert not {"weights", "kv"} & set(train)
        assert not {"master", "activations"} & set(infer)
        assert infer["all"][0] == as_size(found.ledgers[4].resident_bytes("sync"))


def test_memory_of_roles_that_overlap_in_part(model: Path) -> None:
    """A table for each set of roles on a rank, in the order of their first ranks; none for ranks
    without a role.
    """
    found = planned(model, 5, "split.train.ranks=1-3", "split.infer.ranks=0-1")
    assert list(memory(found)) == [
        "memory of infer, most on rank 0",
        "memory of train + infer, most on rank 1",
        "memory of train, most on rank 2",
    ]
    assert list(memory(planned(model, 2))) == ["memory of train + infer, most on rank 0"]


def test_what_the_ranks_of_a_role_hold(model: Path) -> None:
    """An engine's hold the whole model each, whatever axis its ranks are on; those without a role
    are told.
    """
    said = list(lines(planned(model, 9, "split.train.ranks=4", "split.infer.ranks=3")))
    assert said[1:4] == [
        "  train    dp 1 x fsdp 4 x tp 1         ranks 0-3",
        "  infer    3 whole copies               ranks 4-6",
        "  idle     no role                      ranks 7, 8",
    ]
    alone = list(lines(planned(model, 1)))
    assert "  infer    1 whole copy                 ranks 0" in alone
    assert not any("idle" in line for line in alone)


def test_a_recipe_without_an_engine(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--world", "4", f"--model={model}", "--data=x.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "train.fsdp   ranks 0-3" in out
    assert "weight push" not in out


@pytest.mark.parametrize("recipe", ["grpo", "grpo_async", "sft", "dpo", "pretrain", "replay"])
def test_no_data_is_asked_for(model: Path, capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    assert main([recipe, "--world", "2", f"--model={model}"]) == 0
    assert "world of 2" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="model is required"):
        main([recipe, "--world", "2"])


def test_the_config_of_a_run_is_planned(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a file, and as the run's folder. What it sets itself stays."""
    settings = f"model = '{model}'\n[trainer.backend]\nrecompute = 'all'\n"
    for data in ("", "data = 'gone.jsonl'\n", "[data]\n'gone.jsonl' = 1.0\n"):
        ordered = data + settings if not data.startswith("[") else settings + data
        (model / "config.toml").write_text(ordered)
        for given in (model / "config.toml", model):
            words = ["--gpu-gib=79.1", "--fewest-gpus", "--world=8", f"--config={given}"]
            assert main(["grpo", *words]) == 0
            assert capsys.readouterr().out.startswith("    8 GPUs  fits: --nproc 8\n\n")


def test_a_config_that_lacks_what_a_role_is_planned_by(model: Path) -> None:
    known = {"split": Split(), "model": str(model), "trainer": TrainerConfig()}
    for lacking in ({}, {"engine": "fast"}):
        with pytest.raises(
            PlanError, match="split.infer cannot be planned: .* has no `engine: NativeEngineConfig`"
        ):
            resolve(SimpleNamespace(**known, **lacking), 2)
    assert resolve(SimpleNamespace(**known, engine=NativeEngineConfig()), 2).ledgers


def test_the_work_of_a_plan_does_not_grow_with_the_world(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of the same roles have one ledger, which is made and added up once."""
    calls: list[str] = []

    def counted(owner: type, name: str) -> None:
        do = vars(owner)[name]
        monkeypatch.setattr(owner, name, lambda *args: (calls.append(name), do(*args))[1])

    counted(Ledger, "counted")
    counted(Push, "packed_bytes")
    counted(Push, "peers")
    for split in ([], ["split.train.ranks=6", "split.infer.ranks=4-7"]):
        cfg = load(Config, None, [f"model={model}", "data=none.jsonl", *BF16, *split])
        of_sizes = []
        for size in (9, 8192):
            calls.clear()
            resolve(cfg, size, 80 << 30)
            of_sizes.append(Counter(calls))
        assert of_sizes[0] == of_sizes[1]
        assert of_sizes[0].keys() == {"counted", "packed_bytes", "peers"}


def test_needs_no_torch(model: Path) -> None:
    code = (
        "import sys; from spmd_rl.plan import main;"
        f"main(['grpo', '--world', '8', '--model={model}', '--data=x.jsonl']);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "words",
    [
        "--trainer.weights=e4m3",
        "--engine.weights=int4",
        "--engine.weights=int4 --trainer.weights=e4m3",
        "--engine.cache=e4m3",
    ],
)
def test_two_formats_are_refused_as_at_the_start_of_a_run(model: Path, words: str) -> None:
    with pytest.raises(ConfigError, match="are different formats, whose log-probs differ"):
        main(["grpo", "--world=2", f"--model={model}", "--data=x.jsonl", *words.split()])


def test_an_engine_that_nobody_pushes_to_has_a_format_of_its_own(model: Path) -> None:
    words = ["evaluate", "--world=2", f"--model={model}", "--data=x", "--engine.weights=int4"]
    assert main(words) == 0
    with pytest.raises(ConfigError, match="different formats"):
        main([*words, "--checkpoint=c"])


def test_an_sglang_engine_has_weights_and_a_context_of_its_own(model: Path) -> None:
    words = ("engine.kind=sglang", "engine.slab_bytes=1048576", "run.exact=false")
    native, plan = planned(model, 1, "engine.dtype=float32"), planned(model, 1, *words)
    own, beside = plan.ledgers[0], native.ledgers[0]
    assert plan.spec is not None
    weights = plan.spec.num_parameters * 2
    added = {entry.tag for entry in own.entries} - {entry.tag for entry in beside.entries}
    assert added == {"slab", "child"}
    stays = planned(model, 1, *words, "engine.sleep_weights=false").ledgers[0]
    assert stays.resident_bytes("train") - own.resident_bytes("train") == weights
    assert plan.reserved_bytes() >= weights


def test_the_choices_of_recomputation_are_explained(model: Path) -> None:
    said = list(lines(planned(model, 8, "trainer.backend.recompute=all")))
    start = next(i for i, line in enumerate(said) if line.startswith("trainer.backend.recompute"))
    rows = [line.split() for line in said[start + 1 : start + 4]]
    assert [row[0] for row in rows] == ["none", "cheap", "*"]
    assert [row[-1] for row in rows] == ["0%", "0%", "33%"]


def test_host_memory_is_printed_and_required(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["grpo", "--world=1", f"--model={model}", "--data=x.jsonl", "--offload.sleep=always"]
    assert main([*words, "--host-gib=92"]) == 0
    out = capsys.readouterr().out
    assert "in host memory, all the time" in out
    assert "fits in 92 GiB of each host" in out
    with pytest.raises(
        PlanError,
        match=r"rank 0 keeps master 30\.51 GiB \+ moments 61\.03 GiB in host memory; 1 such ranks "
        r"take 91\.54 GiB, and a host has 91\.00 GiB",
    ):
        main([*words, "--host-gib=91"])
    with pytest.raises(PlanError, match="8 such ranks"):
        main([*words, "--world=16", "--host-gib=40"])

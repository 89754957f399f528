"""The Megatron-core backend on gloo ranks, layout by layout, against transformers and FSDP2."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.backends.megatron_case import make_batch, write_model
from tests.backends.reference import LR, WEIGHT_DECAY, Reference, solve
from tests.dist.torchrun import torchrun

pytestmark = [pytest.mark.dist, pytest.mark.backends]
pytest.importorskip("megatron.core", reason="make test-backends installs megatron-core")

Tensors = dict[str, Tensor]
TRAINER = {"lr": LR, "weight_decay": WEIGHT_DECAY, "max_tokens": 100}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SP, WHOLE = {"sequence_parallel": True}, {"distributed_optimizer": False}


class Case(NamedTuple):
    family: str
    num_ranks: int
    split: dict[str, Any]
    backend: dict[str, Any] | None
    trainer: dict[str, Any] = TRAINER


FORMATS = {
    "one rank": Case("qwen3", 1, {}, WHOLE),
    "tp 2": Case("qwen2", 2, {"tp": 2}, WHOLE),
    "tp 2, sequence parallel": Case("qwen3", 2, {"tp": 2}, SP),
    "tp 4": Case("wide", 4, {"tp": 4}, {}),
    "tp 4 over 2 key-value heads": Case("qwen2", 4, {"tp": 4}, {}),
    "tp 2, tied": Case("tied", 2, {"tp": 2}, {}),
    "pp 2": Case("qwen3", 2, {"pp": 2}, {}),
    "pp 2, tied": Case("tied", 2, {"pp": 2}, WHOLE),
    "pp 2 on ranks 1 and 2 of 3": Case("llama", 3, {"ranks": "1-2", "pp": 2}, {}),
    "pp 2, recomputed": Case("qwen3", 2, {"pp": 2}, {"model_options": RECOMPUTE}),
    "pp 2 with 2 chunks": Case("qwen3", 2, {"pp": 2}, {"chunks": 2}, TRAINER | {"max_tokens": 60}),
    "tp 2 x pp 2": Case("qwen3", 4, {"tp": 2, "pp": 2}, SP),
    "cp 2": Case("llama", 2, {"cp": 2}, {}),
    "tp 2 x cp 2": Case("wide", 4, {"tp": 2, "cp": 2}, SP),
    "dp 2": Case("qwen3", 2, {"dp": 2}, {}),
    "dp 2, whole optimizer": Case("tied", 2, {"dp": 2}, WHOLE),
    "experts on one rank": Case("qwen3_moe", 1, {}, {}),
    "ep 2": Case("qwen3_moe", 2, {"ep": 2}, {}),
    "ep 2, whole optimizer": Case("qwen3_moe", 2, {"ep": 2}, WHOLE),
    "tp 2 x ep 2": Case("qwen3_moe", 2, {"tp": 2, "ep": 2}, SP),
    "etp 2": Case("qwen3_moe", 2, {"etp": 2}, WHOLE),
    "tp 2 x ep 2 x etp 2": Case("qwen3_moe", 4, {"tp": 2, "ep": 2, "etp": 2}, SP),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("models")
    return cache(lambda family: write_model(base / family, family))


@pytest.fixture(scope="module")
def reference_of(folder_of: Callable[[str], Path]) -> Callable[[str], Reference]:
    return cache(lambda family: solve(folder_of(family), make_batch(0)))


def launch(
    case: Case, model: Path, work: Path, seeds: tuple[int, ...] = (0,), **more: Any
) -> tuple[dict[str, Any], dict[str, Tensors]]:
    """Run a case, and return its report, and its whole tensors by kind and name."""
    settings = {"split": case.split, "trainer": case.trainer, "model": str(model), **more}
    settings |= {"seeds": seeds} | ({} if case.backend is None else {"backend": case.backend})
    work.mkdir(parents=True, exist_ok=True)
    (work / "case.json").write_text(json.dumps(settings))
    out = work / "out.json"
    arguments = str(work / "case.json"), str(out)
    report = torchrun("megatron_ranks.py", case.num_ranks, out, *arguments, room="backends")
    kinds: dict[str, Tensors] = {}
    for name, tensor in load_file(out.with_suffix(".safetensors")).items():
        kind, _, rest = name.partition("/")
        kinds.setdefault(kind, {})[rest] = tensor
    return report, kinds


def largest_difference(found: Tensors, expected: Tensors) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def check_against(found: dict[str, Tensors], expected: Reference) -> None:
    """Compare what a step left. Where a gradient is almost zero, Adam's first step is its sign."""
    scale = max(float(one.abs().max()) for one in expected.gradients.values())
    for name in expected.start:
        assert torch.equal(found["start"][name], expected.start[name]), name
    assert largest_difference(found["gradients"], expected.gradients) <= 2e-5 * scale
    for name, gradient in expected.gradients.items():
        far = gradient.abs() > 1e-4 * scale
        difference = (found["weights"][name] - expected.weights[name]).abs() * far
        assert float(difference.max()) <= 2e-4, name


@pytest.mark.parametrize("name", FORMATS)
def test_a_step_is_that_of_transformers(
    name: str,
    folder_of: Callable[[str], Path],
    reference_of: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    case = FORMATS[name]
    expected = reference_of(case.family)
    report, found = launch(case, folder_of(case.family), tmp_path)
    scores = torch.tensor(report["scores"][0])
    assert float((scores - expected.scores).abs().max()) <= 2e-5
    (step,) = report["steps"]
    assert step["train/grad_norm"] == pytest.approx(expected.norm, rel=2e-6)
    assert step["train/tokens"] == make_batch(0).num_tokens
    check_against(found, expected)


@pytest.mark.parametrize(
    ("bug", "layout"),
    [
        ("gate and up", "one rank"),
        ("queries and keys", "one rank"),
        ("queries and keys by group", "experts on one rank"),
        ("groups of keys", "experts on one rank"),  # our own attention has no groups
    ],
)
def test_rows_in_another_order_are_found(
    bug: str,
    layout: str,
    folder_of: Callable[[str], Path],
    reference_of: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    """A rule that is wrong both ways gives the same folder back: outputs alone tell."""
    case = FORMATS[layout]
    expected = reference_of(case.family)
    report, found = launch(case, folder_of(case.family), tmp_path, bug=bug)
    assert largest_difference(found["start"], expected.start) == 0
    scores = torch.tensor(report["scores"][0])
    assert float((scores - expected.scores).abs().max()) > 1e-2
    with pytest.raises(AssertionError):
        check_against(found, expected)


def test_every_score_has_its_gradient(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Entropy and candidates too, from a head that is cut, against FSDP2."""
    model = folder_of("qwen3")
    cases = {
        "fsdp2": Case("qwen3", 1, {}, None),
        "cut": Case("qwen3", 4, {"tp": 2, "pp": 2}, {}),
        "cp": Case("qwen3", 2, {"cp": 2}, {}, TRAINER | {"logit_rows": 7}),
    }
    found = {
        name: launch(case, model, tmp_path / name, all_scores=True) for name, case in cases.items()
    }
    expected, weights = found.pop("fsdp2")
    for name, (report, tensors) in found.items():
        for key in ("train/loss", "train/grad_norm", "train/entropy", "test/entropy"):
            same = pytest.approx(expected["steps"][0][key], rel=2e-5)
            assert report["steps"][0][key] == same, (name, key)
        assert largest_difference(tensors["weights"], weights["weights"]) <= 2e-3


def test_several_steps_stay_with_those_of_fsdp2(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    model, seeds = folder_of("qwen3"), (0, 1, 2)
    slow = TRAINER | {"lr": 1e-4, "eps": 1e-4, "minibatches": 2}
    _, expected = launch(Case("qwen3", 2, {}, None, slow), model, tmp_path / "fsdp2", seeds)
    case = Case("qwen3", 4, {"dp": 2, "tp": 2}, SP, slow)
    report, found = launch(case, model, tmp_path / "megatron", seeds)
    assert report["steps"][2]["train/lr"] == pytest.approx(1e-4)
    assert largest_difference(found["weights"], expected["weights"]) <= 2e-6


@pytest.mark.parametrize("case", ["dp 2", "ep 2, whole optimizer"])
def test_moments_in_host_memory_change_no_step(
    case: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two steps with them, and a third without them from their checkpoint, are three without."""
    at = FORMATS[case]
    slow = TRAINER | {"lr": 1e-4, "eps": 1e-4}
    model, folder = folder_of(at.family), str(tmp_path / "1.ckpt")
    streamed = {**(at.backend or {}), "offload": "moments"}
    away = Case(at.family, at.num_ranks, at.split, streamed, slow)
    launch(away, model, tmp_path / "away", (0, 1), save=folder)
    here = Case(at.family, at.num_ranks, at.split, at.backend, slow)
    _, found = launch(here, model, tmp_path / "on", (2,), load=folder)
    _, expected = launch(here, model, tmp_path / "whole", (0, 1, 2))
    assert largest_difference(found["weights"], expected["weights"]) <= 2e-7


def test_checkpoints_go_from_one_backend_to_the_other(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Megatron on tp 2 x pp 2 saves, FSDP2 on 3 ranks goes on and saves, Megatron goes on."""
    model = folder_of("qwen3")
    slow = TRAINER | {"lr": 1e-4, "eps": 1e-4}
    cut = Case("qwen3", 4, {"tp": 2, "pp": 2}, SP, slow)
    sharded = Case("qwen3", 3, {}, None, slow)
    first, second = str(tmp_path / "1.ckpt"), str(tmp_path / "2.ckpt")
    _, one = launch(cut, model, tmp_path / "1", (0,), save=first)
    report, two = launch(sharded, model, tmp_path / "2", (1,), load=first, save=second)
    assert report["version"] == 1 and "megatron-core" in report["differences"][0]
    assert largest_difference(two["start"], one["weights"]) == 0
    report, three = launch(cut, model, tmp_path / "3", (2,), load=second)
    assert report["version"] == 2
    assert largest_difference(three["start"], two["weights"]) == 0
    _, unbroken = launch(Case("qwen3", 1, {}, None, slow), model, tmp_path / "4", (0, 1, 2))
    assert largest_difference(three["weights"], unbroken["weights"]) <= 2e-6


def test_a_checkpoint_of_cut_experts_goes_on_with_whole_ones(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    model, folder = folder_of("qwen3_moe"), str(tmp_path / "1.ckpt")
    slow = TRAINER | {"lr": 1e-4, "eps": 1e-4}
    cut = FORMATS["tp 2 x ep 2 x etp 2"]._replace(trainer=slow)
    alone = FORMATS["experts on one rank"]._replace(trainer=slow)
    _, one = launch(cut, model, tmp_path / "1", (0,), save=folder)
    _, two = launch(alone, model, tmp_path / "2", (1,), load=folder)
    assert largest_difference(two["start"], one["weights"]) == 0
    _, unbroken = launch(alone, model, tmp_path / "3", (0, 1))
    assert largest_difference(two["weights"], unbroken["weights"]) <= 2e-6


@pytest.mark.parametrize(
    ("family", "num_ranks", "split", "backend"),
    [
        ("qwen2", 4, {"tp": 4}, {}),
        ("llama", 4, {"tp": 2, "pp": 2}, {"chunks": 2}),
        ("tied", 2, {"tp": 2}, {}),
        ("qwen3_moe", 4, {"tp": 2, "ep": 4}, SP),
        ("qwen3_moe", 4, {"tp": 2, "ep": 2, "etp": 2}, SP),
    ],
)
def test_folders_come_back_byte_equal(
    family: str,
    num_ranks: int,
    split: dict[str, int],
    backend: dict[str, Any],
    folder_of: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    out = tmp_path / "hf"
    case = Case(family, num_ranks, split, backend)
    launch(case, folder_of(family), tmp_path / "run", (), export=str(out))
    before, after = (load_file(x / "model.safetensors") for x in (folder_of(family), out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_weights_in_bfloat16_have_float32_masters(
    folder_of: Callable[[str], Path], reference_of: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Masters begin with the file's own bits, and move by less than bfloat16 could show."""
    for name, backend in {"sharded": {}, "whole": WHOLE}.items():
        small = TRAINER | {"dtype": "bfloat16", "lr": 1e-5, "weight_decay": 0.0}
        case = Case("qwen3", 2, {"dp": 2}, backend, small)
        report, found = launch(case, folder_of("qwen3"), tmp_path / name)
        expected = reference_of("qwen3")
        assert largest_difference(found["start"], expected.start) == 0
        assert report["steps"][0]["train/grad_norm"] == pytest.approx(expected.norm, rel=0.02)
        moved = [found["weights"][n] - expected.start[n] for n in expected.start]
        assert max(float(one.abs().max()) for one in moved) == pytest.approx(1e-5, rel=0.01)

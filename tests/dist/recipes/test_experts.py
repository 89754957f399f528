"""Mixtures of experts in whole runs: equal bits on every split, and the same command goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spmd_rl.model.read import read_spec
from tests.dist.recipes.conftest import Ended, run_in
from tests.dist.recipes.mixtures import MIXTURES, write_mixture
from tests.system import kill_resume

pytestmark = pytest.mark.dist

SPLITS = {
    "on one rank": (1, ()),
    "sharded over two ranks": (2, ()),
    "two ranks share experts": (2, ("--split.train.ep=2",)),
    "two of three ranks share experts": (
        3,
        ("--split.train.ranks=0-1", "--split.train.ep=2", "--split.infer.ranks=2-2"),
    ),
    "two engines share experts": (2, ("--split.infer.ep=2",)),
    "two of four trainers share experts, and two of four engines": (
        4,
        ("--split.train.ep=2", "--split.infer.ep=2", "--sampling.replay_routes=true"),
    ),
    "two trainers share experts, and two engines of their own": (
        4,
        (
            *("--split.train.ranks=0-1", "--split.train.ep=2"),
            *("--split.infer.ranks=2-3", "--split.infer.ep=2"),
        ),
    ),
    "a rank for each role": (2, ("--split.train.ranks=1", "--split.infer.ranks=1")),
    "routes replayed": (1, ("--sampling.replay_routes=true",)),
}

OF_GLM = (
    "on one rank",
    "two of four trainers share experts, and two of four engines",
    "routes replayed",
)


@pytest.fixture(scope="module", params=MIXTURES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("experts") / "model", family)


@pytest.fixture(scope="module")
def ended(family: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Who shares experts does not depend on the family, so the second one has few splits."""
    folder = tmp_path_factory.mktemp("splits")
    return {
        name: run_in(
            folder,
            "grpo",
            f"--model={model}",
            f"--reward={kill_resume.__file__.replace('kill_resume', 'even')}:even",
            "--trainer.init=folder",
            "--steps=3",
            "--run.verify_every=1",
            *words,
            nproc=nproc,
            name=f"r{number}",
        )
        for number, (name, (nproc, words)) in enumerate(SPLITS.items())
        if family == "qwen3_moe" or name in OF_GLM
    }


def test_no_token_is_unequal(model: Path, ended: dict[str, Ended]) -> None:
    for split, run in ended.items():
        assert run.code == 0, run.sentence
        check_run(run, model, "--sampling.replay_routes=true" in SPLITS[split][1])


def check_run(run: Ended, model: Path, replays: bool) -> None:
    shapes = read_spec(model).parameter_shapes()
    for row in run.metrics:
        assert row["onpolicy/mismatched_tokens"] == 0
        assert row["onpolicy/router_flips"] == 0
        assert row.get("experts/rerouted_worst") == (0 if replays else None)
        assert row["onpolicy/compared_tokens"] > 0
        assert row["sync/verified_tensors"] + row["sync/shared_tensors"] >= len(shapes)
    exported, first = (
        load_file(folder / "model.safetensors") for folder in (run.folder / "hf", model)
    )
    assert {name: tuple(one.shape) for name, one in exported.items()} == {
        name: tuple(one.shape) for name, one in first.items()
    }
    assert exported.keys() >= shapes.keys()
    kept = {name for name, one in exported.items() if torch.equal(one, first[name])}
    assert kept == read_spec(model).fixed_names() | (exported.keys() - shapes.keys())


def test_every_split_draws_the_same_tokens(ended: dict[str, Ended]) -> None:
    first, *others = (run.samples(1) for run in ended.values())
    for other in others:
        assert [one["tokens"] for one in other] == [one["tokens"] for one in first]
        assert [one["logprobs"] for one in other] == [one["logprobs"] for one in first]


def test_replay_changes_no_weight(ended: dict[str, Ended]) -> None:
    own, replayed = (
        load_file(ended[split].folder / "hf" / "model.safetensors")
        for split in ("on one rank", "routes replayed")
    )
    assert all(torch.equal(one, replayed[name]) for name, one in own.items())


ADAPTED = {
    "alone": (2, ()),
    "trainers share experts": (2, ("--split.train.ep=2",)),
    "merged into engines that share experts": (
        2,
        (
            *("--split.train.ep=2", "--split.infer.ep=2"),
            *("--trainer.lora.merged_push=true", "--run.exact=false"),
        ),
    ),
}


def test_adapters_of_experts(model: Path, tmp_path: Path) -> None:
    """Pushed alone they have equal bits, and exports have the adapters of all ranks."""
    runs = {
        name: run_in(
            tmp_path,
            "grpo",
            f"--model={model}",
            *("--trainer.init=folder", "--trainer.lora.rank=32", "--steps=2"),
            *("--trainer.backend.wrap=layer", "--trainer.deterministic=true", *words),
            nproc=nproc,
            name=f"r{number}",
        )
        for number, (name, (nproc, words)) in enumerate(ADAPTED.items())
    }
    for name, ended in runs.items():
        assert ended.code == 0, (name, ended.sentence)
        for row in ended.metrics if "merged" not in name else []:
            assert row["onpolicy/mismatched_tokens"] == row["onpolicy/router_flips"] == 0
            assert row["onpolicy/compared_tokens"] > 0
    alone, shared, _ = (sorted((one.folder / "hf").iterdir()) for one in runs.values())
    assert [path.name for path in alone] == [path.name for path in shared]
    samples = [one.samples(1) for one in runs.values()]
    assert [one["tokens"] for one in samples[0]] == [one["tokens"] for one in samples[1]]

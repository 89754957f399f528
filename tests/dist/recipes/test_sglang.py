"""GRPO with the SGLang engine, on CPUs: a fake SGLang answers in the child of each rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spmd_rl.model.read import read_spec
from tests.dist.recipes.conftest import Run
from tests.dist.recipes.mixtures import write_mixture
from tests.fakes.sglang_child import write_site

pytestmark = pytest.mark.dist


@pytest.fixture
def engine(tmp_path: Path) -> list[str]:
    site = write_site(tmp_path / "site")
    return ["--engine.kind=sglang", f"--engine.python={site}", "--run.exact=false"]


def test_two_ranks_learn_from_their_children(run: Run, engine: list[str]) -> None:
    ended = run("grpo", "--steps=3", *engine, nproc=2, draws=True)
    assert ended.code == 0, ended.sentence
    assert [row["step"] for row in ended.metrics] == [1, 2, 3]
    for row in ended.metrics:
        assert row["onpolicy/compared_tokens"] > 0
        assert row["onpolicy/max_abs_dlogp"] >= row["onpolicy/mean_abs_dlogp"] > 0
    assert "correction: none (correction.mode = none)" in ended.output


TWO_OF_THREE = ["--split.train.ranks=1", "--split.infer.ranks=2"]


@pytest.mark.parametrize(
    ("recipe", "nproc", "words"),
    [
        ("grpo", 2, ["--offload.sleep=always"]),
        ("grpo_async", 3, TWO_OF_THREE),
    ],
    ids=["colocated", "async"],
)
def test_an_engine_on_two_ranks_learns(
    run: Run, engine: list[str], recipe: str, nproc: int, words: list[str]
) -> None:
    """Each rank's child has its part of the weights, whose digests are compared in each push."""
    words = [*engine, *words, "--split.infer.tp=2", "--run.verify_every=1"]
    words += ["--engine.slab_bytes=8192"]  # smaller than some tensors
    ended = run(recipe, "--steps=3", *words, nproc=nproc, draws=recipe == "grpo")
    assert ended.code == 0, ended.sentence
    assert [row["step"] for row in ended.metrics] == [1, 2, 3]
    assert ended.metrics[0]["onpolicy/compared_tokens"] > 0
    assert all(row["sync/verified_tensors"] == 2 * 35 for row in ended.metrics)


def test_experts_on_two_ranks_get_their_pushes(run: Run, engine: list[str], tmp_path: Path) -> None:
    """Each rank has a block of the experts, and its part of attention."""
    model = write_mixture(tmp_path / "mixture", "qwen3_moe")
    words = [*engine, f"--model={model}", "--split.infer.tp=2", "--run.verify_every=1"]
    ended = run("grpo", "--steps=2", *words, "--trainer.lr=1e-3", nproc=2)
    assert ended.code == 0, ended.sentence
    spec = read_spec(model)
    num_experts = len(spec.expert_parts(2))
    expected = 2 * (len(spec.parameter_shapes()) - num_experts) + num_experts
    assert [row["sync/verified_tensors"] for row in ended.metrics] == [expected] * 2


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            "wrong_byte",
            r"'model.embed_tokens.weight'.* does not hold the bits of train.*generates",
        ),
        ("death_in_push", r"the SGLang process of rank 1 \(pid \d+\) (ended|closed)"),
    ],
)
def test_a_fault_of_the_second_rank_is_named(
    run: Run, engine: list[str], fault: str, sentence: str
) -> None:
    words = (*engine, "--split.infer.tp=2", f"--engine.options.fake_{fault}=true")
    ended = run("grpo", "--steps=3", *words, nproc=2)
    assert ended.code != 0
    assert re.search(sentence, ended.sentence), ended.sentence

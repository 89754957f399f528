"""Features in whole runs on real gloo ranks: every split draws the same tokens with no mismatched
bit, and the same command goes on to the same bits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from spmd_rl.model.formats.coded_weights import coded_shapes
from spmd_rl.model.read import read_spec
from tests.dist.recipes.conftest import Ended, run_in
from tests.dist.recipes.mixtures import write_mixture
from tests.dist.recipes.test_data_recipes import KEEP_ALL, forget_after
from tests.dist.recipes.test_loops import DISJOINT, EVEN, check_proof, drawn
from tests.dist.recipes.test_lora import LORA
from tests.dist.recipes.test_merged_push import MERGED
from tests.dist.recipes.test_sleep import ALWAYS, NEVER, exported

pytestmark = pytest.mark.dist

CODES = ("--trainer.weights=e4m3", "--engine.weights=e4m3")
CODES_OF_4_BITS = ("--trainer.weights=int4", "--engine.weights=int4")
CACHE = ("--trainer.cache=e4m3", "--engine.cache=e4m3")
MASTER = "--trainer.backend.offload=master"
KL = "--kl.coef=0.1"
# too few pages for all sequences, prompts in pieces, and no prefix that is computed once
TIGHT = (
    *("--engine.num_pages=16", "--engine.max_batch=32", "--engine.max_step_tokens=36"),
    "--engine.prefix_cache=false",
)
SEQUENCES = ("--split.train.cp=2", "--trainer.max_tokens=64")
REPLAYS = ("--sampling.replay_routes=true", "--sampling.top_p=0.9", "--sampling.top_k=20")
SHARED = ("--split.train.ep=2", "--split.infer.ep=2")
ENGINES = ("--split.train.ranks=1", "--split.infer.ranks=2", "--split.infer.ep=2")
STEPS = 3
Split = tuple[int, tuple[str, ...], int]  # ranks, settings, and steps whose tokens are the same


class Feature(NamedTuple):
    """Settings of a run, splits that draw what it draws, and the model if it is a mixture.

    Two shards sum gradients in another order, so that the first step alone has equal bits there.
    `fact` is what the contract says. Each step has a zero of `zeros`.
    """

    words: tuple[str, ...]
    splits: dict[str, Split] = {}  # noqa: RUF012
    family: str = ""
    nproc: int = 1
    fact: tuple[str, str] = ("", "")
    zeros: tuple[str, ...] = ()


FLIPS = ("onpolicy/router_flips",)
FEATURES = {
    "whole": Feature(
        (NEVER,),
        {
            "asleep": (1, (ALWAYS,), 3),
            "moments elsewhere": (1, (MASTER, NEVER), 3),
            "moments elsewhere, asleep": (1, (MASTER, ALWAYS), 3),
            "two share sequences": (2, SEQUENCES, 1),
        },
    ),
    "codes": Feature(
        (*CODES, KL), {"apart": (2, DISJOINT, 3), "sharded": (2, (), 1)}, fact=("weights", "e4m3")
    ),
    "codes of 4 bits": Feature((*CODES_OF_4_BITS, KL), fact=("weights", "codes from -7 to 7")),
    "cache": Feature(
        CACHE,
        {"tight": (2, (*TIGHT, *DISJOINT), 3), "adapted": (1, ("--trainer.lora.rank=2",), 1)},
        fact=("cache", "e4m3"),
        zeros=("engine/kv_clipped",),
    ),
    "codes and cache": Feature((*CODES, *CACHE), {"two share sequences": (2, SEQUENCES, 1)}),
    "codes of a mixture": Feature(
        CODES, {"four": (4, SHARED, 1)}, "qwen3_moe", fact=("weights", "e4m3"), zeros=FLIPS
    ),
    "codes of another family": Feature(
        CODES, {"engines": (3, ENGINES, 1)}, "glm4_moe", zeros=FLIPS
    ),
    "codes of 4 bits of a mixture": Feature(
        (*CODES_OF_4_BITS, *SHARED), {}, "qwen3_moe", 2, zeros=FLIPS
    ),
    "routes and sequences": Feature(
        (*SEQUENCES, *REPLAYS), {}, "qwen3_moe", 2, zeros=(*FLIPS, "experts/rerouted_worst")
    ),
    "adapters": Feature((*LORA, KL), {"asleep": (1, (ALWAYS,), 3), "apart": (2, DISJOINT, 3)}),
    "adapters on two ranks": Feature(LORA, nproc=2),
    "merged adapters": Feature(
        (*MERGED, KL, NEVER), {"asleep": (1, (ALWAYS,), 3), "apart": (2, DISJOINT, 3)}
    ),
}


def ended_of(folder: Path, name: str, feature: Feature, nproc: int, *words: str) -> Ended:
    """Run a feature to its end. Its run is called `name`."""
    model: tuple[str, ...] = ()
    if feature.family:
        model = (f"--model={folder / 'model'}", "--trainer.init=folder")
    asked = (*model, f"--reward={EVEN}", f"--steps={STEPS}", "--run.verify_every=1", *KEEP_ALL)
    ended = run_in(folder, "grpo", *asked, *feature.words, *words, nproc=nproc, name=name)
    assert ended.code == 0, ended.sentence
    if "--run.exact=false" not in feature.words:
        check_proof(ended, STEPS)
    for row in ended.metrics:
        assert [row[zero] for zero in feature.zeros] == [0] * len(feature.zeros)
    if feature.family:
        spec = read_spec(folder / "model")
        codes = coded_shapes(spec, "e4m3") if "weights" in feature.words[0] else {}
        for row in ended.metrics:
            num_seen = row["sync/verified_tensors"] + row["sync/shared_tensors"]
            assert num_seen >= len(spec.parameter_shapes()) + len(codes)
    return ended


@pytest.fixture(scope="module", params=FEATURES)
def feature(request: pytest.FixtureRequest) -> Feature:
    return FEATURES[request.param]


@pytest.fixture(scope="module")
def folder(feature: Feature, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture's experts have several blocks, of which the last are smaller."""
    folder = tmp_path_factory.mktemp("feature")
    if feature.family:
        sizes = {"moe_intermediate_size": 136, "num_hidden_layers": 2}
        write_mixture(folder / "model", feature.family, sizes)
    return folder


@pytest.fixture(scope="module")
def whole(feature: Feature, folder: Path) -> Ended:
    return ended_of(folder, "whole", feature, feature.nproc)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A control without any feature."""
    return run_in(tmp_path_factory.mktemp("plain"), "grpo", f"--reward={EVEN}", "--steps=1")


def test_every_split_draws_the_same_tokens(
    feature: Feature, folder: Path, whole: Ended, plain: Ended
) -> None:
    for number, (nproc, words, steps) in enumerate(feature.splits.values()):
        ended = ended_of(folder, f"r{number}", feature, nproc, *words)
        assert drawn(ended, steps) == drawn(whole, steps)
        if steps == STEPS:
            assert exported(ended) == exported(whole) != {}
    changes = any("=e4m3" in word or "=int4" in word for word in feature.words)
    assert (drawn(whole, 1) != drawn(plain, 1)) == (changes or bool(feature.family))
    assert "engine/kv_clipped" not in plain.metrics[0]
    clause, fact = feature.fact
    if clause:
        facts = json.loads((whole.folder / "contract.json").read_text())["train->infer"][0]["facts"]
        assert fact in facts[clause]
        assert fact != "e4m3" or "e4m3 codes" in whole.output


def test_the_same_command_goes_on_to_the_same_bits(
    feature: Feature, folder: Path, whole: Ended
) -> None:
    resumed = whole.folder.with_name("resumed")
    shutil.copytree(whole.folder, resumed)
    shutil.rmtree(resumed / "hf")
    config = resumed / "config.toml"
    config.write_text(config.read_text().replace('"whole"', '"resumed"'))
    forget_after(resumed, 1)
    again = ended_of(folder, "resumed", feature, feature.nproc)
    assert "resuming at step 2" in again.output
    assert drawn(again, STEPS) == drawn(whole, STEPS)
    assert again.metrics[-1]["train/loss"] == whole.metrics[-1]["train/loss"]
    assert exported(again) == exported(whole) != {}

"""Matrices over 1, 2 and 4 gloo ranks of FSDP2 (axis tp), and sequences over others (axis cp): the
same bits of log-probs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.rank_checks import check_gradients, check_scores
from tests.dist.recipes.test_tensor_parallel import write_qwen2
from tests.dist.tensor_ranks import BOTH, RESUMED, SPLITS
from tests.dist.torchrun import torchrun
from tests.dist.train_case import make_batch, write_model_folder

pytestmark = pytest.mark.dist

Report = dict[str, Any]


def with_sizes(folder: Path, **sizes: int) -> Path:
    """Have a model sizes that four ranks can share."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensors")


@pytest.fixture(scope="module")
def report(work: Path) -> Report:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    dense = with_sizes(write_model_folder(work / "dense"), intermediate_size=56, **heads)
    biased = write_qwen2(work / "biased", num_key_value_heads=4)
    out = work / "4.json"
    return torchrun("tensor_ranks.py", 4, out, str(dense), str(biased), str(out))


@pytest.mark.parametrize("split", list(SPLITS)[1:])
def test_log_probs_have_the_bits_of_a_rank_with_whole_matrices(split: str, report: Report) -> None:
    assert report["dense"][split] == report["dense"]["tp 1"]


def test_sums_of_few_rows_and_of_many_have_one_tree(report: Report) -> None:
    assert report["exchanged"] == [True] * 5


def test_a_value_head_is_refused(report: Report) -> None:
    assert report["refused"].startswith("split.train.tp = 2: ranks do not share the matrices of")


@pytest.mark.parametrize("split", ["tp 4", BOTH])
def test_biases_and_a_tied_head_are_shared_too(split: str, report: Report) -> None:
    assert report["biased"][split] == report["biased"]["tp 1"]


@pytest.mark.parametrize("split", list(SPLITS)[1:])
def test_the_likeliest_tokens_are_the_same(split: str, report: Report) -> None:
    ids, _ = report["top"]["tp 1"]
    assert np.shape(ids) == (make_batch(5).num_tokens, 3)
    assert report["top"][split] == report["top"]["tp 1"]


@pytest.mark.parametrize("control", ["in a row", "two parts", "tokens in another order"])
def test_a_tree_of_another_shape_and_another_order_show(control: str, report: Report) -> None:
    assert report["controls"][control] != report["dense"]["tp 1"]


@pytest.mark.parametrize("split", list(SPLITS))
def test_gradients_are_those_of_transformers_in_float64(
    split: str, work: Path, report: Report
) -> None:
    check_gradients(work / "hf", work / f"{split}.safetensors")


@pytest.mark.parametrize("split", list(SPLITS))
def test_ranks_that_have_the_same_weights_have_the_same_gradients(
    split: str, report: Report
) -> None:
    assert report["alike"][split]


@pytest.mark.parametrize("split", ["tp 2", BOTH])
def test_entropies_and_candidates_have_gradients(split: str, report: Report) -> None:
    check_scores(report["scores"]["tp 1"], report["scores"][split])


@pytest.mark.parametrize("split", ["tp 2", BOTH])
def test_ranks_without_a_token_to_score_take_part(split: str, report: Report) -> None:
    (bits, norm), (expected, of_one) = (report["one token"][name] for name in (split, "tp 1"))
    assert bits == expected
    assert norm == pytest.approx(of_one, rel=2e-5)


@pytest.mark.parametrize("split", ["tp 2", BOTH])
@pytest.mark.parametrize("recompute", ["cheap", "all"])
def test_layers_that_are_computed_again_exchange_again(
    recompute: str, split: str, report: Report
) -> None:
    found = report["recomputed"][split]
    assert found[recompute] == found["none"]


@pytest.mark.parametrize("split", list(RESUMED))
def test_a_checkpoint_goes_on_with_other_parts(split: str, report: Report) -> None:
    assert report["resumed"][split] == report["saved"][split]

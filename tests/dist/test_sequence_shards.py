"""Sequences over 1, 2 and 4 gloo ranks of FSDP2 (axis cp): the same bits of log-probs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.rank_checks import check_gradients, check_scores
from tests.dist.sequence_ranks import DENSE, MIXTURE
from tests.dist.torchrun import torchrun
from tests.dist.train_case import make_batch, write_mixture_folder, write_model_folder

pytestmark = pytest.mark.dist

Report = dict[str, Any]


def with_four_keys(folder: Path) -> Path:
    """Have a model four heads of keys, and two queries for each."""
    path = folder / "config.json"
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    path.write_text(json.dumps(json.loads(path.read_text()) | heads))
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sequences")


@pytest.fixture(scope="module")
def report(work: Path) -> Report:
    dense = with_four_keys(write_model_folder(work / "dense"))
    mixture = with_four_keys(write_mixture_folder(work / "mixture"))
    out = work / "4.json"
    return torchrun("sequence_ranks.py", 4, out, str(dense), str(mixture), str(out))


@pytest.mark.parametrize("split", DENSE[1:])
def test_log_probs_have_the_bits_of_a_rank_with_whole_sequences(split: str, report: Report) -> None:
    assert report["dense"][split] == report["dense"]["cp 1"]


@pytest.mark.parametrize("split", MIXTURE[1:])
def test_log_probs_of_mixtures_have_them_too(split: str, report: Report) -> None:
    assert report["mixture"][split] == report["mixture"]["cp 1"]


@pytest.mark.parametrize("what", ["lora", "coded", "value"])
def test_adapters_codes_and_values_have_the_same_bits(what: str, report: Report) -> None:
    assert report[what]["cp 2"] == report[what]["cp 1"]
    assert report[what]["cp 1"] != report["dense"]["cp 1"]


@pytest.mark.parametrize("split", DENSE[1:])
def test_the_likeliest_tokens_are_the_same(split: str, report: Report) -> None:
    ids, _ = report["top"]["cp 1"]
    assert np.shape(ids) == (make_batch(5).num_tokens, 3)
    assert report["top"][split] == report["top"]["cp 1"]


def test_tokens_in_another_order_show(report: Report) -> None:
    assert report["control"] != report["dense"]["cp 1"]


@pytest.mark.parametrize("split", DENSE)
def test_gradients_are_those_of_transformers_in_float64(
    split: str, work: Path, report: Report
) -> None:
    check_gradients(work / "hf", work / f"{split}.safetensors")


def test_entropies_and_candidates_have_gradients(report: Report) -> None:
    check_scores(*report["scores"])


@pytest.mark.parametrize("recompute", ["cheap", "all"])
def test_layers_that_are_computed_again_exchange_again(recompute: str, report: Report) -> None:
    assert report[recompute] == report["none"]


def test_a_checkpoint_goes_on_where_one_rank_has_whole_sequences(report: Report) -> None:
    assert report["resumed"] == report["saved"]

"""Mixtures, critics and frozen models on gloo ranks that share matrices, sequences and experts: the
same bits of log-probs and values as on ranks that share nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.dist.shared_axes_ranks import ADAPTED, BALANCED, DENSE, RESUMED, SPLITS
from tests.dist.test_tensor_shards import with_sizes
from tests.dist.torchrun import torchrun
from tests.dist.train_case import write_glm_folder, write_mixture_folder, write_model_folder

pytestmark = pytest.mark.dist

Report = dict[str, Any]
SHARED = list(SPLITS)[1:]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("axes")


@pytest.fixture(scope="module")
def report(work: Path) -> Report:
    mixture = with_sizes(write_glm_folder(work / "mixture"), intermediate_size=56, **HEADS)
    dense = with_sizes(write_model_folder(work / "dense"), intermediate_size=56, **HEADS)
    qwen = with_sizes(write_mixture_folder(work / "qwen"), **HEADS)
    out = work / "4.json"
    paths = map(str, (mixture, qwen, dense, out))
    return torchrun("shared_axes_ranks.py", 4, out, *paths)


def check_close(gradients: Path, expected: Path) -> None:
    found, whole = load_file(gradients), load_file(expected)
    assert found.keys() == whole.keys()
    for name, one in whole.items():
        error = (found[name].double() - one).norm()
        assert error <= 2e-5 * one.norm(), name
        assert one.norm() > 0 or "mlp.gate" not in name, name


@pytest.mark.parametrize("split", SHARED)
@pytest.mark.parametrize("what", ["scores", "top", "frozen"])
def test_a_mixture_has_the_bits_of_ranks_that_share_nothing(
    what: str, split: str, report: Report
) -> None:
    assert report[what][split] == report[what]["alone"]


def test_a_frozen_mixture_has_the_bits_of_a_trainer(report: Report) -> None:
    assert report["frozen"]["alone"] == report["scores"]["alone"]


def test_rows_of_another_rank_show(report: Report) -> None:
    assert report["control"] != report["scores"]["alone"]


@pytest.mark.parametrize("split", SHARED)
def test_gradients_of_a_mixture_are_those_of_ranks_that_share_nothing(
    split: str, work: Path, report: Report
) -> None:
    assert report["alike"][split]
    check_close(work / f"{split}.safetensors", work / "alone.safetensors")


@pytest.mark.parametrize("split", BALANCED[1:])
def test_the_loss_that_balances_experts_is_counted_once(
    split: str, work: Path, report: Report
) -> None:
    """All ranks have the same batch, in which nothing else has a gradient."""
    check_close(work / f"balanced {split}.safetensors", work / "balanced alone.safetensors")


@pytest.mark.parametrize("split", DENSE[1:])
def test_values_have_the_bits_of_ranks_that_share_nothing(split: str, report: Report) -> None:
    alone, shared = (report["critic"][name] for name in ("alone", split))
    assert shared["first"] == alone["first"]
    for step, expected in zip(shared["steps"], alone["steps"], strict=True):
        assert step == pytest.approx(expected, rel=2e-5)
    assert report["dense"][split] == report["dense"]["alone"]


def test_a_critic_may_be_a_mixture(report: Report) -> None:
    alone, shared = report["critic of a mixture"]
    assert shared["first"] == alone["first"]
    for step, expected in zip(shared["steps"], alone["steps"], strict=True):
        assert step == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("split", ADAPTED[1:])
def test_adapters_of_experts_learn_the_same_bits_on_any_number_of_ranks(
    split: str, number: int, report: Report
) -> None:
    """Log-probs before and after, weights and moments, and what is gathered."""
    first, last, _, whole = alone = report["adapted"]["alone"]
    assert report["adapted"][split][number] == alone[number]
    assert first != last
    assert any(".experts.7.down_proj.lora_B" in name for name in whole)


@pytest.mark.parametrize("split", RESUMED)
def test_a_checkpoint_goes_on_where_ranks_share_otherwise(split: str, report: Report) -> None:
    saved, resumed = report["resumed"][split]
    assert resumed == saved


def test_layers_that_are_computed_again_send_rows_again(report: Report) -> None:
    assert report["recomputed"]

"""A batch in a fixed number of parts: the same bits of weights on 1, 2 and 4 gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.parts_ranks import CASES
from tests.dist.torchrun import torchrun
from tests.dist.train_case import write_mixture_folder, write_model_folder

pytestmark = pytest.mark.dist

Report = dict[str, Any]
FIXED = [case for case in CASES if case != "off"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    work = tmp_path_factory.mktemp("parts")
    dense = write_model_folder(work / "dense")
    mixture = write_mixture_folder(work / "mixture")
    out = work / "4.json"
    return torchrun("parts_ranks.py", 4, out, str(dense), str(mixture), str(out))


@pytest.mark.parametrize("case", FIXED)
def test_weights_and_norms_do_not_depend_on_the_ranks(case: str, report: Report) -> None:
    first, *others = (report[case][split] for split in CASES[case][0])
    for other in others:
        assert other == first


def test_norms_of_shared_matrices_are_those_of_whole_ones(report: Report) -> None:
    """A shard that several ranks have is counted once. The second step has other weights."""
    shared, whole = (
        float.fromhex(report[case][split][0][0])
        for case, split in (("matrices", "one, tp 2"), ("whole", "one"))
    )
    assert shared == pytest.approx(whole, rel=1e-4)


def test_without_fixed_parts_they_do(report: Report) -> None:
    norms = [tuple(report["off"][split][0]) for split in CASES["off"][0]]
    assert len(set(norms)) == len(norms)


def test_parts_that_are_dealt_out_in_blocks_show(report: Report) -> None:
    assert report["blocks"] != report["whole"]["two"][0]


@pytest.mark.parametrize("split", ["one", "two", "four"])
def test_a_checkpoint_goes_on_to_the_same_bits_on_other_ranks(split: str, report: Report) -> None:
    norms, state, differences = report["resumed"][split]
    expected = report["whole"]["four"]
    assert norms == expected[0][1:]
    assert state == expected[1]
    assert differences == []

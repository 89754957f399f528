"""GPU kernels of the filters in Triton's interpreter, compared with the sort that defines them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels.vocab.filters import filter_scores_

pytest.importorskip("triton")

from tests.unit.kernels.interpreted import Calls, results

NUM_ROWS, VOCAB = 5, 45
CONSTANTS = {"BLOCK": 16, "NUM_PROGRAMS": 2 * NUM_ROWS}
SCALE = torch.tensor([1.0, 0.7, 2.0, 1.3, 1.0])
GREEDY = torch.arange(NUM_ROWS) % 2 == 0
TOP_K = torch.tensor([1, 0, 7, VOCAB, 1000])
TOP_P = torch.tensor([0.05, 0.9, 0.5, 1.0, 0.99])
MIN_P = torch.tensor([0.0, 0.01, 1.0, 0.2, 0.05])
TIED = 7 * 2.0**-23  # 1 more than this has bits that end in 11, the last quarter of the last turn
CASES = {
    "top-k": ("normal", (TOP_K, None, None)),
    "top-p": ("normal", (None, TOP_P, None)),
    "min-p": ("normal", (None, None, MIN_P)),
    "all, of levels": ("levels", (TOP_K, TOP_P, MIN_P)),
    "two, of zeros of both signs": ("zeros", (TOP_K.flip(0), TOP_P, None)),
    "top-p, of logits far apart": ("far apart", (None, TOP_P, None)),
    "top-k, of logits far apart": ("far apart", (TOP_K, None, None)),
    "top-k, among near ties": ("near ties", (torch.tensor([2, 3, 7, 9, 4]), None, None)),
    "two, some impossible": ("some impossible", (TOP_K.flip(0), TOP_P, None)),
}


def logits(kind: str) -> Tensor:
    normal = 2 * torch.randn(NUM_ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    return {
        "normal": normal,
        "levels": normal.round(),
        "zeros": torch.zeros_like(normal).copysign(normal),
        "far apart": normal * 1e30,
        "near ties": torch.where(normal > 0, -TIED, -9.0).index_fill_(1, torch.tensor([20]), 0.0),
        "some impossible": normal.masked_fill(normal > 1, -torch.inf),
    }[kind]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Return what the kernels leave, with every other row greedy in the last case."""
    arguments = [(logits(kind), SCALE, None, *filters) for kind, filters in CASES.values()]
    arguments.append((logits("normal"), SCALE, GREEDY, None, None, MIN_P))
    calls = Calls("spmd_rl.kernels.vocab.filter_triton", "filtered", CONSTANTS, arguments)
    return dict(
        zip((*CASES, "greedy"), results(calls, tmp_path_factory.mktemp("filters")), strict=True)
    )


@pytest.mark.parametrize("case", CASES)
def test_what_is_left_is_what_a_sort_leaves(left: dict[str, Tensor], case: str) -> None:
    kind, filters = CASES[case]
    expected = filter_scores_(logits(kind) * SCALE.unsqueeze(1), *filters)
    assert torch.equal(left[case], expected)
    assert ((expected == -torch.inf).sum(1) > 0).sum() > 1


def test_greedy_rows_stay_as_they_are(left: dict[str, Tensor]) -> None:
    assert torch.equal(left["greedy"][GREEDY], logits("normal")[GREEDY])
    assert torch.equal(left["greedy"][~GREEDY], left["min-p"][~GREEDY])

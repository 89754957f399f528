"""The Triton kernel of blocked attention in the interpreter: right, whatever lies beside a row.

The interpreter multiplies no bfloat16; that is left to tests/gpu.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.unit.kernels.interpreted import Calls, results

NUM_HEADS, BATCH, NUM_ROWS, NUM_KEYS = 2, 3, 24, 112
SCALE = 0.3
LARGEST = 3.0e38


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor
    num_used: int


def case(dim: int) -> Case:
    generator = torch.Generator().manual_seed(dim)

    def random(rows: int) -> Tensor:
        return torch.randn(NUM_HEADS, BATCH, rows, dim, generator=generator)

    visible = torch.randint(1, NUM_KEYS + 1, (BATCH, NUM_ROWS), generator=generator)
    visible[1:].clamp_(max=70)
    visible[0, :3] = torch.tensor([1, NUM_KEYS, 33])
    return Case(random(NUM_ROWS), random(NUM_KEYS), random(NUM_KEYS), visible, NUM_ROWS)


def exact(given: Case) -> Tensor:
    q, k, v = (x.double() for x in given[:3])
    hidden = torch.arange(k.shape[2]) >= given.visible.unsqueeze(-1)
    scores = (q @ k.transpose(2, 3) * SCALE).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


def beyond_sight(given: Case) -> Case:
    """Keys that no row of a sequence sees hold NaN; keys that some rows do not see are as large as
    can be.
    """
    k, v = given.k.clone(), given.v.clone()
    for one in range(BATCH):
        most = int(given.visible[one].max())
        k[:, one, most:], v[:, one, most:] = torch.nan, torch.nan
    return given._replace(k=k, v=v)


def large_where_one_row_sees(given: Case) -> Case:
    v = given.v.clone()
    v[:, 0, 33:] = LARGEST
    return given._replace(v=v)


def shuffled(given: Case, order: Tensor) -> Case:
    return given._replace(q=given.q[:, :, order], visible=given.visible[:, order])


ORDER = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(5))
SINGLE = case(20)
CASES = {
    "20 columns": SINGLE,
    "64 columns": case(64),
    "shuffled": shuffled(SINGLE, ORDER),
    "one sequence": Case(*(x[:, 1:2] for x in SINGLE[:3]), SINGLE.visible[1:2], NUM_ROWS),
    "one row": Case(SINGLE.q[:, :, 7:8], SINGLE.k, SINGLE.v, SINGLE.visible[:, 7:8], 1),
    "some rows": SINGLE._replace(num_used=9),
    "more keys": SINGLE._replace(
        **{one: torch.nn.functional.pad(getattr(SINGLE, one), (0, 0, 0, 48)) for one in "kv"}
    ),
    "beyond sight": beyond_sight(SINGLE),
    "large": large_where_one_row_sees(SINGLE),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    arguments = [(*given, SCALE) for given in CASES.values()]
    calls = Calls("spmd_rl.kernels.attention.blocked_triton", "attend_in_blocks", {}, arguments)
    return dict(zip(CASES, results(calls, tmp_path_factory.mktemp("attention")), strict=True))


@pytest.mark.parametrize("name", ["20 columns", "64 columns"])
def test_against_float64(found: dict[str, Tensor], name: str) -> None:
    expected = exact(CASES[name])
    assert (found[name] - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("shuffled", lambda whole: whole[:, :, ORDER]),
        ("one sequence", lambda whole: whole[:, 1:2]),
        ("one row", lambda whole: whole[:, :, 7:8]),
        ("more keys", lambda whole: whole),
        ("beyond sight", lambda whole: whole),
    ],
)
def test_a_row_is_the_same_beside_others(found: dict[str, Tensor], name: str, theirs) -> None:
    assert torch.equal(found[name], theirs(found["20 columns"]))


def test_what_nobody_sees_is_not_a_number() -> None:
    """In the case above."""
    assert CASES["beyond sight"].k.isnan().any()
    assert CASES["beyond sight"].v.isnan().any()


def test_rows_that_nobody_uses_are_left_out(found: dict[str, Tensor]) -> None:
    assert torch.equal(found["some rows"][:, :, :9], found["20 columns"][:, :, :9])


def test_what_a_row_does_not_see_adds_zero(found: dict[str, Tensor]) -> None:
    unseeing = SINGLE.visible[0] <= 33
    assert 0 < unseeing.sum() < NUM_ROWS
    assert torch.equal(found["large"][:, 0, unseeing], found["20 columns"][:, 0, unseeing])
    assert not torch.equal(found["large"][:, 0, ~unseeing], found["20 columns"][:, 0, ~unseeing])

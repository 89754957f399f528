"""TokenData: cutting, joining, and tokens that no engine drew."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.types.kept_sets import encode_sets
from spmd_rl.types.token_data import NO_VERSION, TokenData


def drawn(
    length: int, seed: int, *, kept: bool = True, column: bool = True, routes: bytes = b""
) -> TokenData:
    rng = np.random.default_rng(seed)
    sets = b"".join(encode_sets(rng.random((length, 40)) < 0.3)) if kept and length else b""
    return TokenData(
        rng.integers(0, 40, length).astype(np.int32),
        rng.normal(size=length).astype(np.float32),
        rng.integers(0, 9, length).astype(np.int32),
        sets,
        {"seen": rng.integers(0, 99, (length, 8)).astype(np.int16)} if column else {},
        routes,
    )


def plain(data: TokenData) -> list[object]:
    columns = {name: values.tolist() for name, values in data.columns.items()}
    arrays = data.tokens, data.logprobs, data.versions
    return [*(one.tolist() for one in arrays), data.kept, columns]


@given(st.integers(1, 30), st.lists(st.integers(0, 30), max_size=4), st.integers(0, 99))
def test_parts_that_were_cut_join_to_the_whole(length: int, cuts: list[int], seed: int) -> None:
    whole = drawn(length, seed)
    ends = sorted([0, *(min(cut, length) for cut in cuts), length])
    parts = [whole.cut(start, stop) for start, stop in pairwise(ends)]
    assert plain(TokenData.join(parts)) == plain(whole)
    assert plain(whole.cut(0, -1)) == plain(whole.cut(0, length - 1))


def test_observed_tokens_have_empty_sets_and_zeros() -> None:
    first, tool = drawn(3, 1), TokenData.observed(np.array([7, 8], np.int32))
    joined = TokenData.join([first, tool, drawn(2, 2)])
    assert joined.versions[3:5].tolist() == [NO_VERSION] * 2
    assert joined.logprobs[3:5].tolist() == [0, 0]
    assert joined.cut(3, 5).kept == b"\0\0"
    assert not joined.columns["seen"][3:5].any() and joined.columns["seen"][:3].any()


def test_routes_of_what_comes_before_stay_in_front() -> None:
    first = drawn(4, 1, routes=b"first")
    later = drawn(2, 2, routes=b"later")
    assert [first.cut(0, 2).prompt_routes, first.cut(1).prompt_routes] == [b"first", b""]
    observed = TokenData.observed(np.array([7], np.int32))
    assert TokenData.join([observed, later, first]).prompt_routes == b"later"
    assert TokenData.join([first, later]).prompt_routes == b"first"
    assert TokenData.join([observed, drawn(2, 3)]).prompt_routes == b""


def test_a_part_without_sets_or_columns_has_empty_ones_beside_others() -> None:
    joined = TokenData.join([drawn(2, 1, kept=False, column=False), drawn(2, 2)])
    assert joined.cut(0, 2).kept == b"\0\0"
    assert joined.columns["seen"].tolist()[:2] == [[0] * 8] * 2
    assert TokenData.join([drawn(2, 1, kept=False, column=False)]).columns == {}


def test_columns_of_other_kinds_do_not_join() -> None:
    one = drawn(2, 1)
    other = TokenData(one.tokens, one.logprobs, one.versions, b"", {"seen": np.zeros((2, 3), "i2")})
    with pytest.raises(ValueError, match="the column 'seen' is int16 with the shape .2, 3."):
        TokenData.join([one, other])

"""Codec: values that cross between processes, and values that cannot."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from spmd_rl.controller.channel import codec
from spmd_rl.controller.channel.codec import _DTYPES, Codec, Packed, pack
from spmd_rl.controller.channel.import_names import name_of, resolve
from spmd_rl.controller.endpoint import Sharded
from spmd_rl.errors import ContractError
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

arrays = st.sampled_from(_DTYPES).flatmap(
    lambda name: hnp.arrays(np.dtype(name), hnp.array_shapes(min_dims=0, min_side=0))
)


def unpack(packed: Packed, annotation: Any, *, functions: bool = True) -> Any:
    return Codec(annotation, functions=functions).unpack(packed)


@dataclass(frozen=True)
class Nested:
    many: list[NDArray[Any]]
    named: dict[str, NDArray[Any]] = field(default_factory=dict)
    note: str | None = None


@given(
    st.lists(arrays, max_size=4),
    st.dictionaries(st.text(max_size=4), arrays, max_size=3),
    st.none() | st.text(),
)
def test_round_trip_is_bitwise(many: list[Any], named: dict[str, Any], note: str | None) -> None:
    value = Nested(many, named, note)
    back = unpack(pack(value), Nested)
    assert back.note == note
    assert list(back.named) == list(named)
    for old, new in zip([*many, *named.values()], [*back.many, *back.named.values()], strict=True):
        assert (old.dtype, old.shape, old.tobytes()) == (new.dtype, new.shape, new.tobytes())
        assert new.flags.writeable
        assert new.flags.aligned
    assert pack(back) == pack(value)


@pytest.mark.parametrize(
    "array",
    [
        np.ma.masked_equal(np.array([1.0, 2.0, 3.0]), 2.0),
        np.ma.masked,
        np.arange(3).view(np.recarray),
    ],
)
def test_an_array_that_is_more_than_its_bytes_is_refused(array: Any) -> None:
    """The receiver would take masked entries for numbers."""
    sentence = (
        f"^a {type(array).__name__} cannot cross between processes: pass a plain numpy.ndarray"
    )
    for value in (array, {"a": [array]}):
        with pytest.raises(ContractError, match=sentence):
            pack(value)


def test_a_sample_with_a_masked_array_is_refused() -> None:
    masked = np.ma.masked_equal(np.zeros(2, np.float32), 0)
    samples = [Sample(0, 0, np.zeros(2, np.int32), masked, np.zeros(2, np.int32), "completed")]
    with pytest.raises(ContractError, match="a MaskedArray cannot cross between processes"):
        Codec(list[Sample]).pack(samples)


@given(
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0),
    st.lists(st.floats(allow_nan=False) | st.none(), max_size=3),
)
def test_a_body_that_came_before_gives_what_decoding_it_gives(
    shape: tuple[int, ...], plain: list[Any]
) -> None:
    array = NDArray[np.int64]
    known = Codec(tuple[array, list[array], dict[str, array | None], list[float | None]])  # type: ignore[valid-type]
    for seed in range(3):
        many = [np.full(shape, seed), np.full(2, seed)]
        value = (np.full(4, seed), many, {"a": np.arange(3) + seed, "b": None}, plain)
        packed = pack(value)
        back = known.unpack(packed)
        assert known._builders.keys() == {packed[0]}
        assert pack(back) == packed
        for new in (back[0], *back[1], back[2]["a"]):
            assert new.flags.writeable
            assert new.flags.aligned
        for part in back[1:]:
            part.clear()  # a private buffer of the receiver
    with pytest.raises(ContractError, match="buffer is too small for requested array"):
        known.unpack((packed[0], b""))


def test_what_may_look_at_its_arrays_is_built_each_time() -> None:
    known = Codec(Nested)
    for _ in range(2):
        assert isinstance(known.unpack(pack(Nested([np.arange(2)]))), Nested)
    assert list(known._builders.values()) == [None]


@pytest.mark.parametrize("limit", ["MAX_BODY_BYTES", "MAX_PAYLOAD_BYTES"])
def test_oversize_is_refused_where_it_is_made(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    value = ["x" * 100, np.zeros(100)]
    assert pack(value)
    monkeypatch.setattr(codec, limit, 64)
    with pytest.raises(ContractError, match="exceeds the wire's limits"):
        pack(value)


def test_the_nouns_cross() -> None:
    prompt = Prompt(1, np.arange(3, dtype=np.int32), meta={"level": 2})
    sample = Sample(
        1,
        0,
        np.array([5], np.int32),
        np.array([-0.5], np.float32),
        np.zeros(1, np.int32),
        "completed",
        parts={"a": 1.0},
    )
    back = unpack(Codec(list[Group]).pack([Group(prompt, [sample])]), list[Group])
    assert back[0].samples[0].logprobs.dtype == np.float32
    assert back[0].prompt.meta == {"level": 2}


def sample(index: int, size: int) -> Sample:
    arrays = (
        np.arange(size, dtype=np.int32),
        np.full(size, -0.5, np.float32),
        np.full(size, index, np.int32),
    )
    return Sample(7, index, *arrays, "truncated", 0.5, f"{size}", float(size), {"a": 1.0})


def test_lists_of_groups_cross_as_columns() -> None:
    prompts = [Prompt(uid, np.arange(uid, dtype=np.int32)) for uid in range(3)]
    groups = [
        Group(prompts[0], [sample(0, 3), sample(1, 0)]),
        Group(prompts[1], [], [sample(0, 2).replace(metadata={"error": "slow"}), sample(1, 0)]),
    ]
    groups.append(Group(prompts[2], [sample(2, 5)]))
    packed = Codec(Sharded[list[Group]]).pack(groups)
    assert len(packed[0]) < len(pack(groups)[0])
    assert pack(unpack(packed, Sharded[list[Group]])) == pack(groups)
    assert unpack(Codec(list[Group]).pack([]), list[Group]) == []


def test_columns_that_do_not_fit_are_refused() -> None:
    columns = Group.to_columns([Group(Prompt(0, np.zeros(1, np.int32)), [sample(0, 3)])])
    long, flat = np.array([4]), np.zeros((1, 1), np.int64)
    wrongs = [
        *(
            {"lengths": lengths}
            for lengths in (np.array([2]), np.array([-1]), np.array([2, -1]), flat)
        ),
        {"failed": {"lengths": np.array([1])}},
        *(
            {"prompts": {name: wrong}}
            for name, wrong in (("lengths", long), ("text", []), ("uid", flat))
        ),
        *(
            {"samples": {name: wrong}}
            for name, wrong in (("lengths", long), ("text", []), ("reward", np.zeros(0)))
        ),
        *(
            {"samples": {name: wrong}}
            for name, wrong in (("mask", np.ones(2, np.bool_)), ("metadata", [{}, {}]))
        ),
    ]
    for wrong in wrongs:
        changed = {
            name: dataclasses.replace(getattr(columns, name), **value)
            if isinstance(value, dict)
            else value
            for name, value in wrong.items()
        }
        with pytest.raises(ContractError, match="do not fit each other"):
            unpack(pack(dataclasses.replace(columns, **changed)), list[Group])
    with pytest.raises(ContractError, match="Expected `object`, got `array`"):
        unpack(Codec(list[Group]).pack(["no group"]), list[Group])
    lacking = dataclasses.replace(sample(0, 3), logprobs=np.zeros(2, np.float32))
    with pytest.raises(ContractError, match="prompt 7, sample 0: every token needs one log-prob"):
        Codec(list[Group]).pack([Group(Prompt(0, np.zeros(1, np.int32)), [lacking])])


def test_strided_arrays_and_numpy_scalars_cross() -> None:
    view = np.arange(12).reshape(3, 4)[:, ::2]
    assert (unpack(pack(view), NDArray[np.int64]) == view).all()
    assert unpack(pack({"loss": np.float32(0.5), "n": np.int64(3)}), dict[str, float]) == {
        "loss": 0.5,
        "n": 3.0,
    }


@pytest.mark.parametrize(
    ("value", "annotation", "sentence"),
    [
        (np.zeros(2), NDArray[np.int32], "Expected an array of int32, got float64"),
        ([1, 2], NDArray[np.int32], "Expected"),
        ({"x": "no"}, dict[str, int], "Expected `int`, got `str`"),
        ("nothing:here", Callable[[], None], "Expected"),
    ],
)
def test_values_must_fit_their_annotation(value: Any, annotation: Any, sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        unpack(pack(value), annotation)


@pytest.mark.parametrize(
    "value", [object(), np.array(["a"]), np.array([None]), lambda x: x, functools.partial(max, 1)]
)
def test_what_cannot_cross_is_named(value: Any) -> None:
    with pytest.raises(ContractError, match="cannot cross"):
        pack(value)


def test_functions_cross_by_name() -> None:
    back = unpack(pack(functools.partial(name_of, item=1)), Callable[..., Any])
    assert (back.func, back.keywords) == (name_of, {"item": 1})
    assert unpack(pack(resolve), Callable[[str], Any]) is resolve
    assert unpack(pack(None), Callable[[str], Any] | None) is None
    with pytest.raises(ContractError, match="cannot be imported here"):
        resolve("spmd_rl.controller.channel.codec:nothing")


@given(st.data())
def test_mutated_values_never_crash(data: st.DataObject) -> None:
    packed = pack(
        Nested([np.arange(5), np.ones((2, 3), np.float32)], {"k": np.zeros(1, np.bool_)}, "note")
    )
    body = bytearray(packed[0])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    payload = packed[1][: data.draw(st.integers(0, len(packed[1])))]
    try:
        assert isinstance(unpack((bytes(body), payload), Nested), Nested)
    except ContractError:
        return


def test_a_result_names_nothing_to_import() -> None:
    for value, annotation in (
        (os.path.join, Callable[..., str]),
        ([os.path.join], list[Callable[..., str]]),
    ):
        assert unpack(pack(value), annotation) == value
        with pytest.raises(ContractError, match="cannot return a function"):
            unpack(pack(value), annotation, functions=False)

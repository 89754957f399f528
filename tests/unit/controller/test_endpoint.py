"""Endpoints: their signatures, and how arguments and results are split and joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spmd_rl.controller.endpoint import (
    Role,
    Sharded,
    Signature,
    collective,
    endpoints,
    join,
    local,
    shard,
)
from spmd_rl.errors import ConfigError, ContractError


class Counter(Role):
    @collective
    def count(self, words: Sharded[list[str]], scale: float = 1.0) -> Sharded[list[float]]:
        """Count."""
        return [len(word) * scale for word in words]

    @local
    def peek(self) -> int:
        return 3

    def helper(self) -> None: ...


class Child(Counter):
    @collective
    def reset(self, weights: NDArray[np.float32]) -> None: ...


def test_endpoints_are_inherited_and_plain_methods_are_none() -> None:
    assert set(endpoints(Child)) == {"count", "peek", "reset"}
    assert endpoints(Child)["peek"].local
    assert endpoints(Child)["count"].__doc__ == "Count."


def test_on_a_worker_an_endpoint_is_a_method() -> None:
    role = Child(None, None)  # type: ignore[arg-type]
    assert role.count(["a", "bcd"], scale=2.0) == [2.0, 6.0]
    with pytest.raises(ContractError, match="through its handle"):
        role.count.call(["a"])


def test_signature_knows_what_is_sharded() -> None:
    signature = Signature(endpoints(Counter)["count"])
    assert signature.scatters
    assert signature.gathers
    arguments = signature.bind((["a", "b", "c"],), {})
    assert arguments == (["a", "b", "c"], 1.0)
    assert signature.scatter(arguments, 2) == [(["a", "b"], 1.0), (["c"], 1.0)]
    assert signature.gather([[1.0, 2.0], [3.0]]) == [1.0, 2.0, 3.0]
    with pytest.raises(TypeError):
        signature.bind((), {"word": []})


def test_arguments_cross_in_order_also_those_that_go_by_name() -> None:
    class Named(Role):
        @collective
        def shift(
            self, words: Sharded[list[str]], /, by: int = 1, *, sign: str = "+", end: str
        ) -> str:
            return f"{words}{sign}{by}{end}"

        @collective
        def plain(self) -> int:
            return 3

    role = Named(None, None)  # type: ignore[arg-type]
    signature = Signature(endpoints(Named)["shift"])
    for args, kwargs in [((["a"],), {"end": "."}), ((["a"], 2), {"end": ".", "sign": "-"})]:
        arguments = signature.arguments.unpack(
            signature.arguments.pack(signature.bind(args, kwargs))
        )
        assert signature.method(role)(*arguments) == role.shift(*args, **kwargs)
    for wrong in ((["a"], 2, "-", "."), (["a"],)):
        with pytest.raises(TypeError):
            signature.bind(wrong, {})
    none = Signature(endpoints(Named)["plain"])
    assert none.method(role)(*none.arguments.unpack(none.arguments.pack(none.bind((), {})))) == 3


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((1,), {}),
        ((1, 2), {}),
        ((1, 2, 3), {}),
        ((1, 2, 3, 4), {}),
        ((), {"a": 1}),
        ((), {"c": 3, "a": 1}),
        ((1,), {"c": 3}),
        ((1,), {"a": 3}),
        ((1, 2), {"d": 4}),
        ((), {"b": 2}),
    ],
)
def test_arguments_are_bound_as_the_method_binds_them(
    args: tuple[int, ...], kwargs: dict[str, int]
) -> None:
    class Three(Role):
        @collective
        def three(self, a: int, b: int = 20, c: int = 30) -> tuple[int, int, int]:
            return a, b, c

    signature, role = Signature(endpoints(Three)["three"]), Three(None, None)  # type: ignore[arg-type]
    try:
        expected = role.three(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError):
            signature.bind(args, kwargs)
    else:
        assert signature.bind(args, kwargs) == expected


def test_signatures_that_cannot_cross_are_refused() -> None:
    class Bad(Role):
        @collective
        def untyped(self, x) -> None: ...  # type: ignore[no-untyped-def]

        @collective
        def variadic(self, *x: int) -> None: ...

        @collective
        def mute(self, x: int): ...  # type: ignore[no-untyped-def]

        @local
        def split(self, x: Sharded[list[int]]) -> None: ...

        @collective
        def unknown(self, x: NotImported) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for name, sentence in [
        ("untyped", "'x' needs a name and a type"),
        ("variadic", "'x' needs a name and a type"),
        ("mute", "needs a return type"),
        ("split", "nothing of it can be Sharded"),
        ("unknown", "NotImported"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            Signature(endpoints(Bad)[name])


@given(st.lists(st.integers()), st.integers(1, 9))
def test_join_inverts_shard(items: list[int], num_shards: int) -> None:
    parts = shard(items, num_shards)
    assert join(parts, list[int]) == items
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(parts) == num_shards
    assert join(shard(tuple(items), num_shards), tuple) == tuple(items)
    assert (
        join(shard(np.array(items, dtype=object), num_shards), Any) == np.array(items, dtype=object)
    ).all()


def test_classes_bring_their_own_shard_and_join() -> None:
    class Even:
        def __init__(self, items: list[int]) -> None:
            self.items = items

        def shard(self, num_shards: int) -> list[Even]:
            return [Even(self.items[i::num_shards]) for i in range(num_shards)]

        @staticmethod
        def join(parts: list[Even]) -> Even:
            return Even(
                [item for row in zip(*(part.items for part in parts), strict=True) for item in row]
            )

    class Uneven:
        def shard(self, num_shards: int) -> list[int]:
            return [0] * (num_shards + 1)

    assert join(shard(Even([1, 2, 3, 4]), 2), Even).items == [1, 2, 3, 4]
    with pytest.raises(ContractError, match="no shard"):
        shard(3, 2)
    with pytest.raises(ContractError, match=r"Uneven.shard\(2\) gave 3 parts"):
        shard(Uneven(), 2)
    with pytest.raises(ContractError, match="no join"):
        join([3, 4], int)

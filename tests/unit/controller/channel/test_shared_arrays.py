"""Shared arrays: large values cross as names of files, which live as long as someone reads them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spmd_rl.controller.channel.codec import Codec, Packed, pack
from spmd_rl.controller.channel.shared_arrays import (
    NAMED_BYTES,
    SHARED_BYTES,
    ControllerArrays,
    Outgoing,
    SharedArrays,
)
from spmd_rl.errors import ContractError
from spmd_rl.mesh.private_folder import PrivateFolder
from spmd_rl.types.batch import Batch
from tests.unit.types.test_batch import make

CODEC = Codec(dict[str, NDArray[Any]])
BATCH = Codec(Batch)
LARGE = SHARED_BYTES // 8  # entries of 8 bytes


@pytest.fixture
def controller() -> Iterator[ControllerArrays]:
    shared = ControllerArrays(PrivateFolder(in_memory=True))
    yield shared
    shared.close()
    assert not shared.folder.exists()


@pytest.fixture
def worker(controller: ControllerArrays) -> SharedArrays:
    return SharedArrays(controller.folder, "rank0")


def send(shared: SharedArrays, value: Any) -> tuple[Packed, Outgoing]:
    outgoing = Outgoing(shared)
    return pack(value, outgoing), outgoing


def num_files(shared: SharedArrays) -> int:
    gc.collect()
    return len(os.listdir(shared.folder))


@given(st.lists(st.integers(0, 3 * SHARED_BYTES // 8), min_size=1, max_size=4), st.booleans())
def test_a_round_trip_is_bitwise_at_any_size(sizes: list[int], from_worker: bool) -> None:
    with PrivateFolder(in_memory=True) as path:
        shared = SharedArrays(path, "rank0")
        value = {str(i): np.arange(size) * 7 for i, size in enumerate(sizes)}
        value["cut"] = value["0"][::2]  # not contiguous
        value["flags"] = value["0"] % 2 == 0
        packed, _ = send(shared, value)
        is_shared = sum(array.nbytes for array in value.values()) >= SHARED_BYTES
        assert (len(os.listdir(path)) == 1) is is_shared or not is_shared
        assert (len(packed[1]) < 64) is is_shared or not is_shared
        back = CODEC.unpack(packed, shared)
        for name, array in value.items():
            assert (array.dtype, array.shape) == (back[name].dtype, back[name].shape)
            assert array.tobytes() == back[name].tobytes()
            assert back[name].flags.writeable


def test_a_small_value_has_the_bytes_that_it_has_without_sharing(worker: SharedArrays) -> None:
    value = {"a": np.arange(LARGE - 2)}
    assert send(worker, value)[0] == pack(value)


def test_what_a_worker_returns_is_the_controllers_and_goes_on_by_name(
    controller: ControllerArrays, worker: SharedArrays
) -> None:
    packed, _ = send(worker, {"a": np.arange(LARGE), "b": np.ones(9)})
    back = CODEC.unpack(packed, controller)
    assert not back["a"].flags.writeable
    part = {"part": back["a"][100:]}
    again, outgoing = send(controller, part)
    assert num_files(controller) == 1
    assert not again[1]
    del back, part
    assert num_files(controller) == 1, "a call names it"
    received = CODEC.unpack(again, worker)["part"]
    del outgoing
    assert num_files(controller) == 0
    np.testing.assert_array_equal(received, np.arange(100, LARGE))
    received[:] = 0  # it is the worker's own


def test_what_two_ranks_write_into_is_not_one_memory(
    controller: ControllerArrays, worker: SharedArrays
) -> None:
    packed, _outgoing = send(controller, {"a": np.arange(LARGE)})
    first, second = (CODEC.unpack(packed, worker)["a"] for _ in range(2))
    first[:] = -1
    np.testing.assert_array_equal(second, np.arange(LARGE))
    np.testing.assert_array_equal(CODEC.unpack(packed, worker)["a"], second)


def test_an_array_that_may_change_is_written_each_time(controller: ControllerArrays) -> None:
    array = np.arange(LARGE)
    for base in (array, array[:]):
        base.flags.writeable = base is array
        one, first = send(controller, {"a": base})
        array += 1
        other, second = send(controller, {"a": base})
        assert first.files[0] is not second.files[0]
        for packed, value in ((one, array - 1), (other, array)):
            np.testing.assert_array_equal(CODEC.unpack(packed, controller)["a"], value)


def test_the_arrays_of_a_batch_cross_once(
    controller: ControllerArrays, worker: SharedArrays
) -> None:
    """A reference model, a critic and the trainer get one batch, with more columns each time."""
    lengths = [LARGE + number for number in range(8)]
    batch, written = make(lengths), [0]

    def sent(given: Batch) -> list[Batch]:
        outgoing = Outgoing(controller)
        packed = [pack(shard, outgoing) for shard in given.shard(2)]
        written.append(sum(os.stat(entry).st_size for entry in os.scandir(controller.folder)))
        received = [BATCH.unpack(one, worker) for one in packed]
        for shard, original in zip(received, given.shard(2), strict=True):
            assert shard.columns.keys() == original.columns.keys()
            for name in ("tokens", "mask", "advantages", "index"):
                np.testing.assert_array_equal(getattr(shard, name), getattr(original, name))
            for name, column in original.columns.items():
                np.testing.assert_array_equal(shard.columns[name], column)
        return received

    column = np.arange(batch.num_tokens, dtype=np.float32)
    sent(batch)
    sent(batch)
    assert written[2] == written[1]
    scored = batch.with_columns(scores=column)
    sent(scored)
    assert written[3] - written[2] < 1.1 * column.nbytes
    sent(scored.with_columns(more=column + 1))
    assert written[4] - written[3] < 1.1 * column.nbytes
    del batch, scored
    assert num_files(controller) == 0


def test_a_batch_that_was_sent_is_read_only() -> None:
    """A change would not reach ranks that have the array already."""
    batch = make([3, 4])
    batch.advantages[0] = 2
    batch.shard(2)
    with pytest.raises(ValueError, match="read-only"):
        batch.advantages[0] = 3


def test_a_value_that_does_not_fit_crosses_by_the_socket(
    worker: SharedArrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    value = {"a": np.arange(LARGE)}
    assert send(worker, value)[0] == pack(value)
    assert num_files(worker) == 0


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "rank0-9", "rank0-0/..", "", "a\0b"])
def test_a_name_of_no_such_file_is_refused(worker: SharedArrays, name: str) -> None:
    body, _ = send(worker, {"a": np.arange(LARGE)})[0]
    with pytest.raises(ContractError, match="no shared arrays in"):
        CODEC.unpack((body, name.encode()), worker)


def test_an_array_beyond_its_file_is_refused(
    worker: SharedArrays, controller: ControllerArrays
) -> None:
    (body, _), _ = send(worker, {"a": np.arange(LARGE)})
    (_, small), _ = send(worker, {"a": np.zeros(SHARED_BYTES, np.uint8)})
    os.truncate(controller.folder / small.decode(), NAMED_BYTES)
    with pytest.raises(ContractError, match="buffer is too small"):
        CODEC.unpack((body, small), worker)


def test_a_process_that_shares_nothing_refuses_names(worker: SharedArrays) -> None:
    packed, _ = send(worker, {"a": np.arange(LARGE)})
    with pytest.raises(ContractError, match="this process shares no arrays"):
        CODEC.unpack(packed)


def test_a_link_in_the_folder_is_not_followed(worker: SharedArrays, tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_bytes(bytes(SHARED_BYTES))
    (worker.folder / "rank1-0").symlink_to(target)
    (body, _), _ = send(worker, {"a": np.arange(LARGE)})
    with pytest.raises(ContractError, match="no shared arrays"):
        CODEC.unpack((body, b"rank1-0"), worker)


def test_a_forked_process_removes_nothing(controller: ControllerArrays) -> None:
    packed, outgoing = send(controller, {"a": np.arange(LARGE)})
    if (child := os.fork()) == 0:
        del outgoing
        os._exit(0 if gc.collect() >= 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(CODEC.unpack(packed, controller)["a"], np.arange(LARGE))

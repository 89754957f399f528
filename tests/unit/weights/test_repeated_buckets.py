"""Pushes that repeat each other: no table comes twice, and whatever differs has a new one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from spmd_rl.errors import StaleSlabError, WeightsError
from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.slab import bucket_reader, bucket_writer
from spmd_rl.weights.slab.bucket_reader import BucketReader
from spmd_rl.weights.slab.bucket_writer import BucketWriter
from spmd_rl.weights.slab.peer_socket import (
    BucketEntry,
    BucketTable,
    PeerMessage,
    PeerSocket,
    RepeatedBucket,
)
from tests.unit.weights.peer_process import Peer, digest, order, peer_process, push, report
from tests.unit.weights.test_buckets import DEADLINE_S, Pair, pair, send_slab

__all__ = ["pair"]

HALF_BYTES = 2048
NUM_BUCKETS = 3
BOX = Box((0,), (64,))


def weights(seed: int) -> dict[str, Tensor]:
    """Tensors of 256 bytes each, for three buckets of which the last is not full."""
    made = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(64, generator=made) for number in range(20)}


def swapped(tensors: dict[str, Tensor], first: str, second: str) -> dict[str, Tensor]:
    """Return the tensors with two of them in each other's place."""
    other = {first: second, second: first}
    return {other.get(name, name): tensors[other.get(name, name)] for name in tensors}


@pytest.fixture(scope="module")
def engine() -> Iterator[Peer]:
    with peer_process() as peer:
        yield peer


class Rank:
    """The rank's end, with the messages that it sends about buckets."""

    def __init__(self, peer: PeerSocket) -> None:
        self.peer = peer
        self.writer = BucketWriter(send_slab(peer, 2 * HALF_BYTES), peer, DEADLINE_S)

    def push(self, tensors: dict[str, Tensor]) -> list[type[PeerMessage]]:
        """Push, and see that it arrives. Return the kind of message of each bucket."""
        order(self.peer, "push")
        with pytest.MonkeyPatch.context() as patch:
            sent: list[PeerMessage] = []
            send = self.peer.send

            def record(message: PeerMessage, deadline_s: float) -> None:
                sent.append(message)
                send(message, deadline_s)

            patch.setattr(self.peer, "send", record)
            push(self.writer, tensors)
        assert report(self.peer).digest == digest(tensors)
        return [type(message) for message in sent[:-1]]


@pytest.fixture
def rank(engine: Peer) -> Rank:
    return Rank(engine.sockets[0])


def test_a_second_push_sends_no_tables(rank: Rank) -> None:
    assert rank.push(weights(1)) == [BucketTable] * NUM_BUCKETS
    for seed in (2, 3):
        assert rank.push(weights(seed)) == [RepeatedBucket] * NUM_BUCKETS
    assert digest(weights(1)) != digest(weights(2)) != digest(weights(3))


def test_another_order_has_tables_where_it_differs(rank: Rank) -> None:
    rank.push(weights(1))
    kinds = [RepeatedBucket, BucketTable, RepeatedBucket]
    other = swapped(weights(2), "w9", "w10")
    assert rank.push(other) == kinds
    assert rank.push(weights(3)) == kinds
    assert rank.push(swapped(weights(4), "w0", "w19")) == [BucketTable, RepeatedBucket, BucketTable]
    assert rank.push(weights(5)) == [BucketTable, RepeatedBucket, BucketTable]
    assert rank.push(weights(6)) == [RepeatedBucket] * NUM_BUCKETS


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.view(torch.int32),  # another dtype of the same size
        lambda one: one.bfloat16(),
        lambda one: one.view(8, 8),
        lambda one: one[:32],
    ],
    ids=["dtype", "smaller dtype", "shape", "size"],
)
def test_another_tensor_of_the_same_name_has_a_table(
    rank: Rank, change: Callable[[Tensor], Tensor]
) -> None:
    rank.push(weights(1))
    other = weights(2)
    other["w12"] = change(other["w12"])
    assert rank.push(other) == [RepeatedBucket, BucketTable, RepeatedBucket]
    assert rank.push(other) == [RepeatedBucket] * NUM_BUCKETS


def test_fewer_and_more_tensors_have_a_table(rank: Rank) -> None:
    rank.push(weights(1))
    fewer, more = weights(2), weights(3)
    del fewer["w19"]
    more["more"] = torch.ones(3)
    kinds = [RepeatedBucket, RepeatedBucket, BucketTable]
    assert rank.push(fewer) == kinds
    assert rank.push(more) == kinds
    assert rank.push({"w0": torch.ones(64)}) == [BucketTable]
    assert rank.push(more) == [BucketTable, RepeatedBucket, RepeatedBucket]


def test_another_part_of_a_tensor_has_a_table(rank: Rank) -> None:
    """Both boxes have the same extent, and would have the same slot."""
    tensor = torch.arange(1024, dtype=torch.int32)  # two buckets
    assert rank.push({"w": tensor}) == [BucketTable] * 2
    assert rank.push({"w": tensor + 1}) == [RepeatedBucket] * 2
    halves = [Box((0,), (512,)), Box((512,), (512,))]
    order(rank.peer, "push")
    for box in reversed(halves):
        slot = rank.writer.slot("w", box, (1024,), "int32")
        assert slot is not None
        slot.copy_(tensor[box.within(Box((0,), (1024,)))])
        rank.writer.flush()
    rank.writer.finish()
    assert report(rank.peer).digest == digest({"w": tensor})


def test_buckets_after_the_kept_ones_have_tables(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_writer, "MAX_KEPT_TABLES", 1)
    for kind in (BucketTable, RepeatedBucket, RepeatedBucket):
        assert rank.push(weights(1)) == [kind, BucketTable, BucketTable]


def test_a_new_slab_begins_with_tables(engine: Peer) -> None:
    first = Rank(engine.sockets[0])
    first.push(weights(1))
    second = Rank(engine.sockets[0])
    assert second.push(weights(2)) == [BucketTable] * NUM_BUCKETS


def test_a_closed_slab_has_no_slots(pair: Pair) -> None:
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: [pair.reader.ack(bucket) for bucket in pair.reader])
        pair.writer.slot("w", BOX, (64,), "float32")
        table_id = pair.writer.flush()
        pair.writer.finish()
        reading.result()
    assert table_id is not None
    pair.slab.close()
    with pytest.raises(StaleSlabError, match="was closed: make a writer over the new slab"):
        pair.writer.slot("w", BOX, (64,), "float32")
    with pytest.raises(StaleSlabError, match="was closed"):
        pair.writer.repeat(table_id)


def test_a_bucket_is_repeated_by_the_number_of_its_table(pair: Pair) -> None:
    """Its slots are the same tensors, and a number that is not the bucket's gives none."""
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: [len(_read(pair.reader)) for _ in range(3)])
        slots = [pair.writer.slot(name, BOX, (64,), "float32") for name in "ab"]
        table_id = pair.writer.flush()
        assert table_id is not None
        assert not pair.writer.repeat(table_id)  # the second bucket has another table
        pair.writer.finish()
        assert not pair.writer.repeat(table_id + 1)
        assert pair.writer.slot("a", BOX, (64,), "float32") is slots[0]
        assert not pair.writer.repeat(table_id)  # the bucket was begun
        assert pair.writer.slot("b", BOX, (64,), "float32") is slots[1]
        assert pair.writer.flush() == table_id
        pair.writer.finish()
        assert pair.writer.repeat(table_id)
        assert pair.writer.flush() == table_id
        pair.writer.finish()
        assert reading.result() == [1, 1, 1]


def test_the_targets_of_a_repeated_bucket_are_asked_for_once(pair: Pair) -> None:
    target, asked = torch.zeros(64), []

    def target_of(entry: BucketEntry) -> Tensor:
        asked.append(entry.name)
        return target

    def read() -> None:
        for bucket in pair.reader:
            bucket.copy(target_of)
            pair.reader.ack(bucket)

    with ThreadPoolExecutor(1) as pool:
        for number, name in enumerate(["a", "a", "b", "b"]):
            reading = pool.submit(read)
            slot = pair.writer.slot(name, BOX, (64,), "float32")
            assert slot is not None
            slot.fill_(number + 1)
            pair.writer.finish()
            reading.result()
            assert (target == number + 1).all()
    assert asked == ["a", "b"]


def _read(reader: BucketReader) -> list[int]:
    """Read one push, and return the tables of its buckets."""
    table_ids = []
    for bucket in reader:
        table_ids.append(bucket.table_id)
        reader.ack(bucket)
    return table_ids


def _entry(name: str) -> BucketEntry:
    return BucketEntry(name, BOX, "float32", (64,), 0)


def _next(pair: Pair, message: PeerMessage) -> bucket_reader.Bucket:
    """Have the reader begin a push with this message."""
    pair.rank.send(message)
    return next(iter(pair.reader))


def test_an_unknown_table_is_refused_and_the_rank_is_told(pair: Pair) -> None:
    problem = "bucket 0 repeats table 5, which never came or was replaced"
    with pytest.raises(WeightsError, match=problem):
        _next(pair, RepeatedBucket(pair.slab.generation, 0, 0, 5))
    with pytest.raises(WeightsError, match=f"engine of rank 3 reports: {problem}"):
        pair.rank.receive(DEADLINE_S)


def test_a_replaced_table_and_that_of_another_bucket_are_refused(pair: Pair) -> None:
    generation = pair.slab.generation
    for table_id in (5, 6):
        _next(pair, BucketTable(generation, 0, 0, table_id, [_entry("w")]))
    assert _next(pair, RepeatedBucket(generation, 0, 0, 6)).table_id == 6
    with pytest.raises(WeightsError, match="bucket 0 repeats table 5"):
        _next(pair, RepeatedBucket(generation, 0, 0, 5))
    pair.rank.send(RepeatedBucket(generation, 0, 0, 6))
    buckets = iter(pair.reader)
    next(buckets)
    pair.rank.send(RepeatedBucket(generation, 1, 1, 6))
    with pytest.raises(WeightsError, match="bucket 1 repeats table 6"):
        next(buckets)


def test_a_stale_generation_is_refused_and_all_tables_are_forgotten(pair: Pair) -> None:
    generation = pair.slab.generation
    _next(pair, BucketTable(generation, 0, 0, 5, [_entry("w")]))
    assert _next(pair, RepeatedBucket(generation, 0, 0, 5)).table_id == 5
    stale = f"bucket 0 lies in slab {generation + 1}, and slab {generation} is mapped"
    with pytest.raises(StaleSlabError, match=stale):
        _next(pair, RepeatedBucket(generation + 1, 0, 0, 5))
    with pytest.raises(WeightsError, match="bucket 0 repeats table 5"):
        _next(pair, RepeatedBucket(generation, 0, 0, 5))


def test_a_slab_that_the_process_closed_is_stale(pair: Pair) -> None:
    generation = pair.slab.generation
    _next(pair, BucketTable(generation, 0, 0, 5, [_entry("w")]))
    pair.mapped.close()
    with pytest.raises(StaleSlabError, match="bucket 0 lies in slab"):
        _next(pair, RepeatedBucket(generation, 0, 0, 5))


@pytest.mark.parametrize(("number", "half"), [(1, 1), (0, 1), (2, 0)])
def test_a_repeated_bucket_in_the_wrong_place_is_refused(
    pair: Pair, number: int, half: int
) -> None:
    _next(pair, BucketTable(pair.slab.generation, 0, 0, 5, [_entry("w")]))
    with pytest.raises(WeightsError, match=f"bucket {number} in half {half} came where bucket 0"):
        _next(pair, RepeatedBucket(pair.slab.generation, number, half, 5))  # type: ignore[arg-type]

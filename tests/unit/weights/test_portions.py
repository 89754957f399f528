"""Portions through a slab: every byte arrives once, and no end hangs because the other failed."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.errors import DeadlineError, LostRankError, WeightsError
from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.slab.peer_socket import (
    EndOfPush,
    PeerFailure,
    PeerSocket,
    PortionAck,
    PortionEntry,
    PortionTable,
)
from spmd_rl.weights.slab.portion_reader import PortionReader
from spmd_rl.weights.slab.portion_writer import PortionWriter
from spmd_rl.weights.slab.portions import cut_box
from spmd_rl.weights.slab.slab import MappedSlab, Slab
from tests.laws.test_import import HEAVY, probe
from tests.unit.weights.peer_process import (
    Peer,
    digest,
    order,
    own_report,
    peer_process,
    push,
    read_push,
    report,
)

CPU = torch.device("cpu")
DEADLINE_S = 60.0
SLAB_BYTES = 64 << 10
EMPTY = Box((0,), (0,))


def weights(seed: int) -> dict[str, Tensor]:
    """Tensors of several dtypes, some larger than half a slab."""
    made = torch.Generator().manual_seed(seed)
    shapes = {"norm": (48,), "embed": (700, 48), "up": (96, 48), "scalar": (), "row": (1, 20000)}
    tensors = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    tensors |= {f"{name}.bf16": tensor.bfloat16() for name, tensor in tensors.items()}
    return tensors


@pytest.fixture(scope="module")
def engine() -> Iterator[Peer]:
    with peer_process() as peer:
        yield peer


class Pair:
    """Both ends of a socket and a slab, in this process."""

    def __init__(self, num_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        self.rank, self.engine = PeerSocket(ours, "engine of rank 3"), PeerSocket(theirs, "rank 3")
        self.slab = Slab.create(num_bytes, CPU)
        self.slab.send(self.rank)
        self.mapped = MappedSlab.receive(self.engine, CPU)
        self.writer = PortionWriter(self.slab, self.rank, DEADLINE_S)
        self.reader = PortionReader(self.mapped, self.engine, DEADLINE_S)

    def close(self) -> None:
        self.rank.close()
        self.engine.close()
        self.slab.close()
        self.mapped.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(4096)
    yield pair
    pair.close()


def send_slab(peer: PeerSocket, num_bytes: int = SLAB_BYTES) -> Slab:
    slab = Slab.create(num_bytes, CPU)
    order(peer, "slab")
    slab.send(peer)
    assert report(peer).digest == ""
    return slab


def fill(writer: PortionWriter, name: str) -> None:
    slot = writer.slot(name, Box((0,), (16,)), (16,), "float32")
    assert slot is not None
    slot.fill_(1.0)


boxes = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=0, max_size=4).map(
    lambda dims: Box(tuple(o for o, _ in dims), tuple(e for _, e in dims))
)


@given(boxes, st.sampled_from([1, 2, 4, 8]), st.integers(1, 300))
def test_cutting_keeps_every_element_once_and_in_order(
    box: Box, item_bytes: int, max_items: int
) -> None:
    parts = list(cut_box(box, item_bytes, max_items * item_bytes))
    assert all(part.num_elements <= max_items for part in parts)
    size = tuple(box.end)
    index = torch.arange(Box(size, size).num_elements).view(size)
    expected = index[box.within(Box((0,) * len(size), size))].reshape(-1)
    pieces = [index[part.within(Box((0,) * len(size), size))].reshape(-1) for part in parts]
    assert torch.equal(torch.cat(pieces), expected)


def test_an_element_larger_than_a_portion_cannot_be_cut() -> None:
    for box in (Box((), ()), Box((0,), (3,))):
        with pytest.raises(WeightsError, match="no room for one element"):
            list(cut_box(box, 8, 4))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 40), min_size=0, max_size=3),
            st.sampled_from(["float32", "bfloat16", "uint8", "int64"]),
        ),
        max_size=8,
    ),
    st.integers(512, 4096),
)
def test_every_byte_of_every_box_arrives_once(
    shapes: list[tuple[list[int], str]], num_bytes: int
) -> None:
    pair = Pair(num_bytes)
    made = torch.Generator().manual_seed(len(shapes))
    tensors = {
        f"t{number}": torch.randint(0, 200, shape, generator=made).to(getattr(torch, dtype))
        for number, (shape, dtype) in enumerate(shapes)
    }
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_push, pair.reader)
        push(pair.writer, tensors)
        received = reading.result()
    assert received.keys() == tensors.keys()
    assert all(torch.equal(received[name], tensors[name]) for name in tensors)
    pair.close()


def test_a_push_reaches_the_other_process(engine: Peer) -> None:
    (peer,) = engine.sockets
    slab = send_slab(peer)
    writer = PortionWriter(slab, peer, DEADLINE_S)
    for seed in (1, 2):
        order(peer, "push")
        push(writer, weights(seed))
        assert report(peer).digest == digest(weights(seed))
    assert digest(weights(1)) != digest(weights(2))
    slab.close()


def test_a_push_of_nothing_ends(engine: Peer) -> None:
    (peer,) = engine.sockets
    slab = send_slab(peer)
    order(peer, "push")
    PortionWriter(slab, peer, DEADLINE_S).finish()
    assert report(peer).digest == digest({})
    slab.close()


def test_a_hundred_pushes_leak_neither_descriptors_nor_memory(engine: Peer) -> None:
    (peer,) = engine.sockets
    tensors, expected = weights(1), digest(weights(1))
    states = []
    for number in range(110):
        if number % 10 == 0:  # a new slab, as after sleeping
            slab = send_slab(peer, 4 << 20)
            writer = PortionWriter(slab, peer, DEADLINE_S)
        order(peer, "push")
        push(writer, tensors)
        theirs = report(peer)
        assert theirs.digest == expected
        if number % 10 == 9:
            slab.close()
            states.append((own_report(), theirs))
    for before, after in zip(states[0], states[-1], strict=True):
        assert after.num_fds == before.num_fds
        assert after.rss_kib - before.rss_kib < 16 << 10  # ten slabs would be 40 MiB


def test_twenty_pushes_at_once() -> None:
    with peer_process(num_sockets=20) as (_, peers), ThreadPoolExecutor(20) as pool:

        def push_twice(number: int) -> list[str]:
            peer = peers[number]
            slab = send_slab(peer)
            writer = PortionWriter(slab, peer, DEADLINE_S)
            received = []
            for seed in (number, number + 1):
                order(peer, "push")
                push(writer, weights(seed))
                received.append(report(peer).digest)
            slab.close()
            return received

        digests = [digest(weights(seed)) for seed in range(21)]
        assert list(pool.map(push_twice, range(20))) == [
            digests[number : number + 2] for number in range(20)
        ]


def test_a_process_that_dies_in_a_push_is_named() -> None:
    with peer_process() as (process, (peer,)):
        writer = PortionWriter(send_slab(peer), peer, DEADLINE_S)
        order(peer, "die")
        with pytest.raises(LostRankError, match=rf"engine of rank 3 \(pid {process.pid}\) closed"):
            push(writer, weights(1))
        assert process.wait() == -signal.SIGKILL


def test_a_process_that_is_killed_while_the_rank_waits_is_named() -> None:
    with peer_process() as (process, (peer,)), ThreadPoolExecutor(1) as pool:
        writer = PortionWriter(send_slab(peer), peer, DEADLINE_S)
        order(peer, "stall")
        fill(writer, "a")
        writer.flush()
        assert report(peer).digest == ""  # it has the portion
        fill(writer, "b")
        waiting = pool.submit(writer.flush)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(LostRankError, match=f"pid {process.pid}"):
            waiting.result()


def test_a_process_that_does_not_acknowledge_is_named(pair: Pair) -> None:
    writer = PortionWriter(pair.slab, pair.rank, 0.05)
    fill(writer, "a")
    writer.flush()
    fill(writer, "b")
    with pytest.raises(DeadlineError, match=r"engine of rank 3 did not answer within 0\.05 s"):
        writer.flush()


def test_a_rank_that_dies_is_an_end_of_file() -> None:
    with peer_process() as (_, (peer,)):
        order(peer, "owner dies")
        mapped = MappedSlab.receive(peer, CPU)
        reader = PortionReader(mapped, peer, DEADLINE_S)
        portions = iter(reader)
        assert (next(portions).tensors[0] == 3.0).all()
        with pytest.raises(LostRankError, match="closed its end"):
            next(portions)


def test_a_half_is_not_used_again_before_its_ack(pair: Pair) -> None:
    with ThreadPoolExecutor(1) as pool:
        fill(pair.writer, "a")
        pair.writer.flush()
        fill(pair.writer, "b")
        flushed = pool.submit(pair.writer.flush)
        reader = PortionReader(pair.mapped, pair.engine, DEADLINE_S)
        portions = iter(reader)
        first, second = next(portions), next(portions)
        assert [first.half, second.half] == [0, 1]
        assert not flushed.done()
        reader.ack(first)
        flushed.result()
        fill(pair.writer, "c")
        finished = pool.submit(pair.writer.finish)
        third = next(portions)
        assert third.half == 0 and third.entries[0].name == "c"
        with pytest.raises(WeightsError, match="portion 2 cannot be acknowledged before portion 1"):
            reader.ack(third)
        reader.ack(second)
        reader.ack(third)
        assert list(portions) == []
        finished.result()


def test_a_full_half_gives_no_slot(pair: Pair) -> None:
    whole = Box((0,), (pair.writer.max_bytes,))
    fill(pair.writer, "a")
    assert pair.writer.slot("b", whole, whole.extent, "uint8") is None
    pair.writer.flush()
    assert pair.writer.slot("b", whole, whole.extent, "uint8") is not None
    too_large = "a box of 'c' has 4096 bytes and a portion 2048: cut it"
    with pytest.raises(WeightsError, match=too_large):
        pair.writer.slot("c", whole, whole.extent, "bfloat16")


def test_the_other_process_needs_no_heavy_package_but_torch() -> None:
    _, modules = probe("import spmd_rl.weights.slab.portion_reader")
    assert modules & HEAVY == {"torch"}


def test_a_slab_without_room_for_two_portions_is_refused(pair: Pair) -> None:
    with pytest.raises(WeightsError, match="a slab of 511 bytes is too small for two portions"):
        PortionWriter(Slab.create(511, CPU), pair.rank, 1.0)


def entry(**changes: object) -> PortionEntry:
    facts = {"name": "w", "box": Box((0,), (4,)), "dtype": "uint8", "shape": (4,), "offset": 0}
    return PortionEntry(**facts | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ((0, 0, [entry(offset=4096)]), "bytes 4096 to 4100 are asked for"),
        ((0, 0, [entry(offset=2048)]), "the box of 'w' lies outside half 0"),
        ((0, 0, [entry(offset=1792, box=Box((0,), (300,)), shape=(300,))]), "outside half 0"),
        ((0, 0, [entry(offset=3)]), "offset 3 of a slab is not a multiple"),
        ((0, 0, [entry(box=Box((1,), (4,)))]), "the box of 'w' lies outside its tensor"),
        ((0, 0, [entry(box=Box((-1,), (4,)))]), "the box of 'w' lies outside its tensor"),
        ((0, 0, [entry(box=Box((0,), (-4,)))]), "the box of 'w' lies outside its tensor"),
        ((0, 0, [entry(box=Box((0, 0), (4,)))]), "the box of 'w' has other dims"),
        ((0, 0, [entry(dtype="object")]), "no dtype 'object'"),
        ((0, 1, []), "portion 0 in half 1 came where portion 0 was expected"),
        ((1, 1, []), "portion 1 in half 1 came where portion 0 was expected"),
    ],
)
def test_a_wrong_table_is_refused_and_the_rank_is_told(
    pair: Pair, table: tuple[int, int, list[PortionEntry]], problem: str
) -> None:
    number, half, entries = table
    pair.rank.send(PortionTable(pair.slab.generation, number, half, 1, entries))  # type: ignore[arg-type]
    with pytest.raises(WeightsError, match=problem):
        next(iter(PortionReader(pair.mapped, pair.engine, DEADLINE_S)))
    with pytest.raises(WeightsError, match=f"engine of rank 3 reports: .*{problem}"):
        pair.rank.receive(DEADLINE_S)


def test_a_portion_before_its_half_is_free_is_refused(pair: Pair) -> None:
    for number in range(3):
        pair.rank.send(PortionTable(pair.slab.generation, number, number % 2, 1, []))  # type: ignore[arg-type]
    portions = iter(PortionReader(pair.mapped, pair.engine, DEADLINE_S))
    next(portions), next(portions)
    with pytest.raises(WeightsError, match="portion 2 came before portion 0 was free"):
        next(portions)


def test_an_end_after_another_number_of_portions_is_refused(pair: Pair) -> None:
    pair.rank.send(EndOfPush(1))
    with pytest.raises(WeightsError, match=re.escape("EndOfPush(num_portions=1) came where")):
        next(iter(PortionReader(pair.mapped, pair.engine, DEADLINE_S)))


@pytest.mark.parametrize(("generation", "number"), [(0, 1), (1, 0)])
def test_an_ack_of_another_portion_is_refused(pair: Pair, generation: int, number: int) -> None:
    fill(pair.writer, "a")
    pair.engine.send(PortionAck(pair.slab.generation + generation, number))
    with pytest.raises(WeightsError, match="in place of an acknowledgement of portion 0"):
        pair.writer.finish()


def test_a_failure_of_the_process_ends_the_push_with_its_words(pair: Pair) -> None:
    PortionReader(pair.mapped, pair.engine).fail("tensor 'w' is not known")
    fill(pair.writer, "a")
    with pytest.raises(WeightsError, match="engine of rank 3 reports: tensor 'w' is not known"):
        pair.writer.finish()
    assert PeerFailure("x") != EndOfPush(0)

"""Weight plan: which rank sends which box of which tensor to which other rank (no torch).

Each rank plans its own moves from the layouts of all ranks, because the number of moves of a world
grows with the square of its size. Tensors that all ranks hold alike are planned together. A box of
a destination may meet several boxes of the sources. Each of those comes from one of its holders:
the destination itself, else a rank on its host, else any rank. Several holders take turns. So each
element is written exactly once, and a rank never receives what it holds itself.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from spmd_rl.errors import PlanError
from spmd_rl.weights.plan.layout import ITEM_BYTES, Box, Layout, Piece, disjoint
from spmd_rl.weights.plan.layout_rules import LayoutRules, compressed
from spmd_rl.weights.plan.tensors_alike import TensorsAlike, tensors_alike

SCHEMA = 4
ROUND_BYTES = 256 << 20  # that a rank sends to all its peers at once, and receives from them
MIN_BUCKET_BYTES = 4 << 20  # of a round, for one peer
ROUNDS_AT_ONCE = 2  # one is packed while the one before is on its way


@dataclass(frozen=True, slots=True)
class Move:
    """Rank `src` gives `box`, in the tensor's global indices, to rank `dst`, as `dtype`.

    It is a part of the box `into`, one of the pieces of `dst`.
    """

    name: str
    box: Box
    dtype: str
    src: int
    dst: int
    into: Box

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class MoveGroup:
    """The moves of one rank that are the same for each of some tensors, which `names` lists."""

    names: tuple[str, ...]
    moves: tuple[Move, ...]  # of the first name

    def __iter__(self) -> Iterator[Move]:
        for name in self.names:
            for move in self.moves:
                yield Move(name, move.box, move.dtype, move.src, move.dst, move.into)


@dataclass(frozen=True)
class WeightPlan:
    """The moves of one rank, in groups, and the facts that all ranks share.

    `replica_groups` are the boxes that this rank holds beside another source, for a comparison of
    the first holder (`src`) with each other one (`dst`).

    Of all bytes of the whole world, `local_bytes` stay in their process, and `wire_bytes` cross
    between ranks. `digest` is the SHA-256 of the input of the plan.
    """

    groups: tuple[MoveGroup, ...]
    replica_groups: tuple[MoveGroup, ...]
    local_bytes: int
    wire_bytes: int
    bucket_bytes: int
    digest: str

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All moves: by name and, for each name, by destination and offset."""
        return tuple(move for group in self.groups for move in group)

    @cached_property
    def replicas(self) -> tuple[Move, ...]:
        """All moves of `replica_groups`; nothing is copied along them."""
        return tuple(move for group in self.replica_groups for move in group)


@dataclass(frozen=True)
class Traffic:
    """The bytes that one rank moved in one push."""

    aliased_bytes: int
    copied_bytes: int
    sent_bytes: int
    received_bytes: int


def plan_moves(
    src: Sequence[Layout | LayoutRules],
    dst: Sequence[Layout | LayoutRules],
    nodes: Mapping[int, int] | None,
    rank: int,
) -> WeightPlan:
    """Plan the moves of `rank` that fill every piece of `dst` from the pieces of `src`.

    `nodes` maps a rank to its host; it is None where all ranks share one host.
    Raises: PlanError naming a tensor that one end lacks, that differs in shape, or whose parts
    overlap; or, on the rank that needs it, one that the sources do not hold in full.
    """
    sources, destinations = _as_rules(src), _as_rules(dst)
    facts = repr((SCHEMA, sorted((nodes or {}).items()), sources, destinations))
    tensors = [
        _TensorMoves(alike, nodes or {})
        for alike in tensors_alike(sources, destinations)
        if _is_pushed(alike)
    ]
    local_bytes = sum(tensor.local_bytes * len(tensor.names) for tensor in tensors)
    all_bytes = sum(tensor.all_bytes * len(tensor.names) for tensor in tensors)
    return WeightPlan(
        _groups((tensor.names, tensor.moves_of(rank)) for tensor in tensors),
        _groups((tensor.names, tensor.replicas(rank)) for tensor in tensors),
        local_bytes,
        all_bytes - local_bytes,
        bucket_bytes(len(sources), len(destinations)),
        hashlib.sha256(facts.encode()).hexdigest(),
    )


def bucket_bytes(num_sources: int, num_destinations: int) -> int:
    """Return the most that one rank sends to another in a round, by the ranks at both ends.

    Buckets get smaller with the number of peers, so that a round of all of them stays as large.
    """
    num_peers = max(num_sources, num_destinations, 1)
    return max(ROUND_BYTES // num_peers, MIN_BUCKET_BYTES)


def _groups(found: Iterable[tuple[tuple[str, ...], Iterable[Move]]]) -> tuple[MoveGroup, ...]:
    """Return a group for the moves of each tensor that has some."""
    groups = (MoveGroup(names, tuple(moves)) for names, moves in found)
    return tuple(group for group in groups if group.moves)


def _as_rules(layouts: Sequence[Layout | LayoutRules]) -> list[LayoutRules]:
    rules = [one if isinstance(one, LayoutRules) else compressed(one) for one in layouts]
    return sorted(rules, key=lambda one: one.rank)


def _is_pushed(alike: TensorsAlike) -> bool:
    """Whether both ends have these tensors. Raises: PlanError if one lacks what is not private."""
    name, held, wanted = alike.names[0], alike.sources, alike.wanted
    if not held or not wanted:
        if all(piece.private for _, piece in [*held, *wanted]):
            return False
        holder, other = ("engine", "trainer") if wanted else ("trainer", "engine")
        raise PlanError(f"weight plan: the {holder} holds tensor '{name}', the {other} does not")
    shapes = {piece.shape for _, piece in [*wanted, *held]}
    if len(shapes) > 1:
        raise PlanError(
            f"weight plan: tensor '{name}' has different shapes on its ranks: {sorted(shapes)}"
        )
    return True


class _Holders:
    """The ranks that hold one box of a tensor. They send it in turns."""

    def __init__(
        self, ranks: list[int], wanted: Mapping[int, list[int]], node_of: Mapping[int, int]
    ) -> None:
        self.ranks = ranks
        self._node_of = node_of
        # the numbers of wanted pieces on ranks that hold the box themselves
        self._self_served = sorted(n for rank in ranks for n in wanted.get(rank, ()))
        self._on_node: dict[int | None, list[int]] = defaultdict(list)
        for rank in ranks:
            self._on_node[node_of.get(rank)].append(rank)

    def sender(self, index: int, rank: int) -> int:
        """Return the rank that sends the box for wanted piece number `index`, on `rank`."""
        num_before = bisect_left(self._self_served, index)
        if num_before < len(self._self_served) and self._self_served[num_before] == index:
            return rank
        senders = self._on_node.get(self._node_of.get(rank)) or self.ranks
        return senders[(index - num_before) % len(senders)]


class _TensorMoves:
    """The moves of one tensor, which stands for those that all ranks hold alike."""

    def __init__(self, alike: TensorsAlike, node_of: Mapping[int, int]) -> None:
        self.names = alike.names
        self._name = name = alike.names[0]
        self._wanted = wanted = alike.wanted
        by_box: dict[Box, list[int]] = defaultdict(list)
        self._boxes_of: dict[int, list[Box]] = defaultdict(list)
        for rank, piece in alike.sources:
            if piece.box.num_elements and rank not in by_box[piece.box]:
                by_box[piece.box].append(rank)
                self._boxes_of[rank].append(piece.box)
        if not disjoint(by_box):
            raise PlanError(
                f"weight plan: ranks hold parts of tensor '{name}' "
                "that overlap and are not the same"
            )
        numbers: dict[int, list[int]] = defaultdict(list)
        for index, (rank, _) in enumerate(wanted):
            numbers[rank].append(index)
        self._holders = {box: _Holders(by_box[box], numbers, node_of) for box in sorted(by_box)}

    @property
    def all_bytes(self) -> int:
        return sum(piece.box.num_elements * ITEM_BYTES[piece.dtype] for _, piece in self._wanted)

    @property
    def local_bytes(self) -> int:
        """The bytes that destinations hold as sources too."""
        num_bytes = 0
        for rank, piece in self._wanted:
            for box in self._boxes_of.get(rank, ()):
                common = self._common(piece, box)
                if common is not None:
                    num_bytes += common.num_elements * ITEM_BYTES[piece.dtype]
        return num_bytes

    def moves_of(self, rank: int) -> Iterator[Move]:
        """Yield the moves that `rank` sends or receives."""
        own_boxes = sorted(self._boxes_of.get(rank, ()))
        for index, (target, piece) in enumerate(self._wanted):
            if target == rank:
                yield from self._receives(index, rank, piece)
                continue
            for box in own_boxes:
                common = self._common(piece, box)
                if common is not None and self._holders[box].sender(index, target) == rank:
                    yield Move(self._name, common, piece.dtype, rank, target, piece.box)

    def replicas(self, rank: int) -> Iterator[Move]:
        """Yield each box that `rank` and another source hold, of which one is its first holder."""
        dtype = self._wanted[0][1].dtype
        for box, holders in self._holders.items():
            first, *others = holders.ranks
            for other in others if rank == first else {rank}.intersection(others):
                yield Move(self._name, box, dtype, first, other, box)

    def _receives(self, index: int, rank: int, piece: Piece) -> Iterator[Move]:
        """Yield the moves that fill `piece` of `rank`."""
        num_missing = piece.box.num_elements
        for box, holders in self._holders.items():
            common = self._common(piece, box)
            if common is not None:
                num_missing -= common.num_elements
                sender = holders.sender(index, rank)
                yield Move(self._name, common, piece.dtype, sender, rank, piece.box)
        if num_missing:
            hole = _first_hole(piece.box, self._holders)
            raise PlanError(
                f"weight plan: no source rank holds rows {hole.offset} .. {hole.end} "
                f"of tensor '{self._name}', which rank {rank} needs"
            )

    @staticmethod
    def _common(piece: Piece, box: Box) -> Box | None:
        """Return the part of `box` that `piece` needs, if any."""
        return piece.box.intersect(box) if piece.box.num_elements else None


def _first_hole(wanted: Box, boxes: Iterable[Box]) -> Box:
    """Return the first part of `wanted` that none of `boxes` covers."""
    missing = [wanted]
    for box in boxes:
        rest: list[Box] = []
        for part in missing:
            common = part.intersect(box)
            rest += [part] if common is None else part.subtract(common)
        missing = rest
    return missing[0]

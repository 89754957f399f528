"""The weight plan: which rank sends which box of which tensor to whom. Pure, no torch.

Each rank plans what it sends and what it receives itself, from the layouts of all: the moves of a
world grow with its square. For every box that a destination holds, each box of the sources that it
meets comes from one of those who hold it: itself, else somebody on its host, else anybody, taken in
turns. So each element is written exactly once, and what a rank holds itself it never receives.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spmd_rl.errors import PlanError
from spmd_rl.weights.layout import ITEM_BYTES, Box, Layout, Piece, disjoint

SCHEMA = 2
BUCKET_BYTES = 256 << 20  # what is packed for one peer at once

Owners = list[tuple[int, Piece]]  # who holds what of one tensor, by rank


@dataclass(frozen=True)
class Move:
    """Rank `src` hands `box` (in the tensor's global indices) to rank `dst`, as `dtype`, the
    destination's.
    """

    name: str
    box: Box
    dtype: str
    src: int
    dst: int

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Plan:
    """What one rank sends and receives, ordered by (name, dst, offset), and what all ranks have to
    agree on.

    `local_bytes` stay in their process, aliased or copied, and `wire_bytes` cross between ranks: of
    the whole world. `digest` is the SHA-256 of what the plan was made from.
    """

    moves: tuple[Move, ...]
    local_bytes: int
    wire_bytes: int
    digest: str


def plan(
    src: Sequence[Layout], dst: Sequence[Layout], nodes: Mapping[int, int] | None, rank: int
) -> Plan:
    """Plan what `rank` does so that every piece of `dst` is filled from the pieces of `src`.

    `nodes` maps a rank to its host; None where all share one.
    Raises: PlanError naming the tensor that one side lacks, that differs in shape, of which sources
    hold parts that overlap, or, on the rank that needs it, that nobody holds in full.
    """
    sources, destinations = _by_name(src), _by_name(dst)
    _check_names(sources, destinations)
    moves: list[Move] = []
    local_bytes = all_bytes = 0
    for name, wanted in sorted(destinations.items()):
        tensor = _Tensor(name, sources[name], wanted, nodes or {})
        moves += tensor.moves_of(rank)
        local_bytes += tensor.local_bytes
        all_bytes += tensor.all_bytes
    return Plan(
        tuple(moves),
        local_bytes,
        all_bytes - local_bytes,
        _digest(sources, destinations, nodes or {}),
    )


class _Holders:
    """Those who hold one box of a tensor, and whose turn it is to send it."""

    def __init__(
        self, ranks: list[int], wanted: Mapping[int, int], node_of: Mapping[int, int]
    ) -> None:
        self._ranks = ranks
        self._node_of = node_of
        self._served = sorted(wanted[rank] for rank in ranks if rank in wanted)  # by themselves
        self._on_node: dict[int | None, list[int]] = defaultdict(list)
        for rank in ranks:
            self._on_node[node_of.get(rank)].append(rank)

    def sender(self, index: int, rank: int) -> int:
        """Who sends the box to `rank`, the destination numbered `index`."""
        before = bisect_left(self._served, index)
        if before < len(self._served) and self._served[before] == index:
            return rank
        near = self._on_node.get(self._node_of.get(rank)) or self._ranks
        return near[(index - before) % len(near)]


class _Tensor:
    """The moves of one tensor."""

    def __init__(
        self, name: str, sources: Owners, wanted: Owners, node_of: Mapping[int, int]
    ) -> None:
        self._name = name
        self._wanted = wanted
        self._own = {rank: piece.box for rank, piece in sources if piece.box.num_elements}
        by_box: dict[Box, list[int]] = defaultdict(list)
        for rank, box in self._own.items():
            by_box[box].append(rank)
        if not disjoint(by_box):
            raise PlanError(
                f"weight plan: ranks hold parts of tensor '{name}' that overlap and are not the same"
            )
        numbers = {rank: index for index, (rank, _) in enumerate(wanted)}
        self._holders = {box: _Holders(by_box[box], numbers, node_of) for box in sorted(by_box)}

    @property
    def all_bytes(self) -> int:
        return sum(piece.box.num_elements * ITEM_BYTES[piece.dtype] for _, piece in self._wanted)

    @property
    def local_bytes(self) -> int:
        """What destinations hold as sources."""
        common = ((piece, self._common(piece, self._own.get(rank))) for rank, piece in self._wanted)
        return sum(
            box.num_elements * ITEM_BYTES[piece.dtype] for piece, box in common if box is not None
        )

    def moves_of(self, rank: int) -> Iterator[Move]:
        """What `rank` sends and receives."""
        own = self._own.get(rank)
        for index, (target, piece) in enumerate(self._wanted):
            if target == rank:
                yield from self._received(index, rank, piece)
            elif (
                own
                and self._holders[own].sender(index, target) == rank
                and (box := self._common(piece, own))
            ):
                yield Move(self._name, box, piece.dtype, rank, target)

    def _received(self, index: int, rank: int, piece: Piece) -> Iterator[Move]:
        """What fills `piece` of `rank`."""
        missing = piece.box.num_elements
        for box, holders in self._holders.items():
            if (common := self._common(piece, box)) is not None:
                missing -= common.num_elements
                yield Move(self._name, common, piece.dtype, holders.sender(index, rank), rank)
        if missing:
            hole = _first_hole(piece.box, self._holders)
            raise PlanError(
                f"weight plan: no source rank holds rows {hole.offset} .. {hole.end} of tensor '{self._name}', "
                f"which rank {rank} needs"
            )

    @staticmethod
    def _common(piece: Piece, box: Box | None) -> Box | None:
        """What `piece` wants of `box`."""
        return piece.box.intersect(box) if box is not None and piece.box.num_elements else None


def _by_name(layouts: Sequence[Layout]) -> dict[str, Owners]:
    found: dict[str, Owners] = defaultdict(list)
    for layout in sorted(layouts, key=lambda one: one.rank):
        for piece in layout.pieces:
            found[piece.name].append((layout.rank, piece))
    return dict(found)


def _check_names(sources: Mapping[str, Owners], destinations: Mapping[str, Owners]) -> None:
    for name in sorted(destinations.keys() ^ sources.keys()):
        here, there = ("engine", "trainer") if name in destinations else ("trainer", "engine")
        raise PlanError(f"weight plan: the {here} holds tensor '{name}', the {there} does not")
    for name, pieces in sorted(destinations.items()):
        shapes = {piece.shape for _, piece in [*pieces, *sources[name]]}
        if len(shapes) > 1:
            raise PlanError(
                f"weight plan: tensor '{name}' has different shapes on its ranks: {sorted(shapes)}"
            )


def _first_hole(wanted: Box, boxes: Iterable[Box]) -> Box:
    """The first part of `wanted` that none of `boxes` covers."""
    missing = [wanted]
    for box in boxes:
        common = ((one, one.intersect(box)) for one in missing)
        missing = [
            left for one, hole in common for left in ([one] if hole is None else one.subtract(hole))
        ]
    return missing[0]


def _digest(
    sources: Mapping[str, Owners], destinations: Mapping[str, Owners], nodes: Mapping[int, int]
) -> str:
    """All that a plan depends on, in one order."""
    found = hashlib.sha256(repr((SCHEMA, sorted(nodes.items()))).encode())
    for side in (sources, destinations):
        for name, held in sorted(side.items()):
            pieces = [
                (rank, one.shape, one.dtype, one.box.offset, one.box.extent) for rank, one in held
            ]
            found.update(repr((name, pieces)).encode())
    return found.hexdigest()

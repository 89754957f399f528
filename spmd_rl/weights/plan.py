"""The weight plan: which rank sends which box of which tensor to whom. Pure, no torch.

For every box that a destination holds, sources are taken in the order self, same node, least loaded, lowest rank,
until the box is covered; each element is written exactly once, and what a rank holds itself it never receives.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from spmd_rl.errors import PlanError
from spmd_rl.weights.layout import ITEM_BYTES, Box, Layout, Piece

SCHEMA = 1
BUCKET_BYTES = 256 << 20  # what is packed for one peer at once


@dataclass(frozen=True)
class Move:
    """Rank `src` hands `box` (in the tensor's global indices) to rank `dst`, as `dtype`, the destination's."""

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
    """All moves, ordered by (name, dst, offset): the same list on every rank."""

    moves: tuple[Move, ...]

    @property
    def local_bytes(self) -> int:
        """What stays in its process: aliased or copied."""
        return sum(move.num_bytes for move in self.moves if move.src == move.dst)

    @property
    def wire_bytes(self) -> int:
        """What crosses between ranks."""
        return sum(move.num_bytes for move in self.moves if move.src != move.dst)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical form, for all ranks to agree on before the first byte."""
        text = json.dumps([SCHEMA, [asdict(move) for move in self.moves]], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def plan(src: Sequence[Layout], dst: Sequence[Layout], nodes: Mapping[int, int] | None = None) -> Plan:
    """Plan the moves that fill every piece of `dst` from the pieces of `src`.

    `nodes` maps a rank to its host; a source on the destination's own host is preferred.
    Raises: PlanError naming the tensor that one side lacks, that differs in shape, or that nobody holds in full.
    """
    sources = _by_name(src)
    destinations = _by_name(dst)
    _check_names(sources, destinations)
    node_of = nodes or {}
    load: dict[int, int] = defaultdict(int)
    moves: list[Move] = []
    for name in sorted(destinations):
        for rank, piece in destinations[name]:
            found = _cover(rank, piece, sources[name], node_of, load)
            moves.extend(sorted(found, key=lambda move: move.box))
    return Plan(tuple(moves))


def _by_name(layouts: Sequence[Layout]) -> dict[str, list[tuple[int, Piece]]]:
    found: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for layout in sorted(layouts, key=lambda one: one.rank):
        for piece in layout.pieces:
            found[piece.name].append((layout.rank, piece))
    return dict(found)


def _check_names(
    sources: Mapping[str, list[tuple[int, Piece]]], destinations: Mapping[str, list[tuple[int, Piece]]]
) -> None:
    for name in sorted(destinations.keys() ^ sources.keys()):
        here, there = ("engine", "trainer") if name in destinations else ("trainer", "engine")
        raise PlanError(f"weight plan: the {here} holds tensor '{name}', the {there} does not")
    for name, pieces in sorted(destinations.items()):
        shapes = {piece.shape for _, piece in [*pieces, *sources[name]]}
        if len(shapes) > 1:
            raise PlanError(f"weight plan: tensor '{name}' has different shapes on its ranks: {sorted(shapes)}")


def _cover(
    rank: int, piece: Piece, sources: list[tuple[int, Piece]], node_of: Mapping[int, int], load: dict[int, int]
) -> list[Move]:
    """The moves that fill `piece` on `rank`; adds their bytes to the load of the ranks that send them."""

    def preference(source: tuple[int, Piece]) -> tuple[bool, bool, int, int]:
        other = source[0]
        return other != rank, node_of.get(other) != node_of.get(rank), load[other], other

    missing = [piece.box] if piece.box.num_elements else []
    moves = []
    for source, held in sorted(sources, key=preference):
        left: list[Box] = []
        for box in missing:
            common = box.intersect(held.box)
            if common is None:
                left.append(box)
                continue
            left.extend(box.subtract(common))
            moves.append(Move(piece.name, common, piece.dtype, source, rank))
            if source != rank:
                load[source] += moves[-1].num_bytes
        missing = left
    if missing:
        raise PlanError(
            f"weight plan: no source rank holds rows {missing[0].offset} .. {missing[0].end} of tensor '{piece.name}', "
            f"which rank {rank} needs"
        )
    return moves

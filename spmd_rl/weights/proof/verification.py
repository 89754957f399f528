"""Verification of a push: each rank compares the digests of what it has with those of the sources.

A source digests the boxes that it gives, cast as they are pushed, and sends 8 bytes a box along the
same moves. Their sum is what a rank expects of a piece. Boxes that several sources hold are
compared too, each with that of its first holder.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import send_and_receive
from spmd_rl.weights.plan.layout import Box
from spmd_rl.weights.plan.moves import Move
from spmd_rl.weights.proof.digest import MODULUS
from spmd_rl.weights.proof.source_digests import SourceDigests, index_of
from spmd_rl.weights.proof.verdict import Verification, WeightMismatch

MAX_NAMED = 8  # mismatches that a rank describes


@dataclass
class Target:
    """A box that this rank compares. `own` is the number of its digest here, if it is a replica."""

    name: str
    box: Box
    own: int | None
    sources: list[int] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, move: Move) -> None:
        """Count one of the moves that make up this box."""
        self.num_bytes += move.num_bytes
        if move.src not in self.sources:
            self.sources.append(move.src)

    def mismatch(self, rank: int) -> WeightMismatch:
        sources, is_replica = sorted(self.sources), self.own is not None
        return WeightMismatch(self.name, self.box, rank, sources, is_replica)


class Verifier:
    """The comparisons of one rank, for pushes that carry out the same moves.

    `replicas` are boxes of one source (`src`) that another (`dst`) holds too.
    """

    def __init__(self, moves: Sequence[Move], replicas: Sequence[Move], ends: LocalEnds) -> None:
        self._ends = ends
        self._given = SourceDigests(ends)
        self._numbers: dict[tuple[object, ...], int] = {}
        self._targets: list[Target] = []
        self._local: list[tuple[int, int]] = []  # numbers of a box and of its target
        self._outgoing: dict[int, list[int]] = defaultdict(list)  # numbers of boxes
        self._incoming: dict[int, list[int]] = defaultdict(list)  # numbers of targets
        for move in moves:
            if move.dst != ends.rank or (move.name, move.into) not in ends.shared:
                self._add(move, is_replica=False)
        for move in replicas:
            self._add(move, is_replica=True)

    @torch.no_grad()
    def compare(self, group: dist.ProcessGroup | None) -> Verification:
        """Compare what the sink holds now with what the sources hold.

        Ranks: every rank that the plan names, together.
        Blocks: until this rank's digests are sent and received; the group's timeout ends it.
        """
        clock = _Clock(self._ends.device)
        sums = self._given.sums()
        expected = self._expected(sums, group)
        found = self._ends.sink.digest() if self._ends.sink is not None else {}
        expected_values, own = expected.tolist(), sums.tolist()
        seconds = clock.seconds()
        equal, unequal, unknown = [], [], []
        for target, value in zip(self._targets, expected_values, strict=True):
            held = found.get((target.name, target.box)) if target.own is None else own[target.own]
            if held is None:
                unknown.append(target)
            elif (held - value) % MODULUS:
                unequal.append(target)
            elif target.own is None:
                equal.append(target)
        return self._verification(equal, unequal, len(unknown), seconds)

    def _verification(
        self, equal: list[Target], unequal: list[Target], num_unknown: int, seconds: float
    ) -> Verification:
        smallest = min(equal, key=lambda target: target.num_bytes, default=None)
        rank, shared = self._ends.rank, len(self._ends.shared)
        mismatches = [target.mismatch(rank) for target in unequal[:MAX_NAMED]]
        name = smallest.name if smallest is not None else ""
        return Verification(
            len(equal), len(unequal), shared, num_unknown, mismatches, name, seconds
        )

    def _add(self, move: Move, is_replica: bool) -> None:
        """Note this rank's part in the comparison of one move."""
        rank, key = self._ends.rank, (move.name, move.box, move.dtype)
        if move.dst != rank:
            self._outgoing[move.dst].append(self._given.number(key))
            return
        number = self._target(move, self._given.number(key) if is_replica else None)
        self._targets[number].add(move)
        if move.src == rank:
            self._local.append((self._given.number(key), number))
        else:
            self._incoming[move.src].append(number)

    def _target(self, move: Move, own: int | None) -> int:
        """Return the number of the comparison that a move is a part of."""
        key = (move.name, move.into) if own is None else (move.name, move.into, move.src)
        number = self._numbers.setdefault(key, len(self._numbers))
        if number == len(self._targets):
            self._targets.append(Target(move.name, move.into, own))
        return number

    def _expected(self, sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Return the sum of the sources' digests for each comparison."""
        expected = torch.zeros(len(self._targets), dtype=torch.int64, device=sums.device)
        for numbers, received in self._exchanged(sums, group):
            expected.index_add_(0, index_of(numbers, sums.device), received)
        if self._local:
            boxes, targets = zip(*self._local, strict=True)
            given = sums[index_of(boxes, sums.device)]
            expected.index_add_(0, index_of(targets, sums.device), given)
        return expected

    def _exchanged(
        self, sums: Tensor, group: dist.ProcessGroup | None
    ) -> list[tuple[list[int], Tensor]]:
        """Send and receive digests; return those of each peer, with the numbers of targets."""
        sends = {
            peer: sums[index_of(boxes, sums.device)]
            for peer, boxes in sorted(self._outgoing.items())
        }
        receives = {
            peer: torch.empty(len(numbers), dtype=torch.int64, device=sums.device)
            for peer, numbers in sorted(self._incoming.items())
        }
        send_and_receive(sends, receives, group)
        return [(self._incoming[peer], received) for peer, received in receives.items()]


class _Clock:
    """Seconds that a comparison takes, without the copies of the push that a GPU still works on."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self._began = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds since this was created. Waits for the GPU."""
        if not self._events:
            return time.perf_counter() - self._began
        began, ended = self._events
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) * 1e-3

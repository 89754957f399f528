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

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.weights.digest import MODULUS, box_sums
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import send_and_receive
from spmd_rl.weights.layout import Box, Dims
from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.plan import Move
from spmd_rl.weights.verdict import Verification, WeightMismatch

MAX_NAMED = 8  # mismatches that a rank describes


@dataclass
class Target:
    """A box that this rank compares. `own` is the number of its digest here, if it is a replica."""

    name: str
    box: Box
    own: int | None
    sources: list[int] = field(default_factory=list)
    num_bytes: int = 0


class Verifier:
    """The comparisons of one rank, for pushes that carry out the same moves.

    `replicas` are boxes of one source (`src`) that another (`dst`) holds too.
    """

    def __init__(self, moves: Sequence[Move], replicas: Sequence[Move], ends: LocalEnds) -> None:
        self._ends = ends
        self._boxes: dict[tuple[str, Box, str], int] = {}  # what is digested here, by its dtype
        self._targets: dict[tuple[object, ...], int] = {}
        self._compared: list[Target] = []
        self._local: list[tuple[int, int]] = []  # numbers of a box and of its target
        self._outgoing: dict[int, list[int]] = defaultdict(list)  # numbers of boxes
        self._incoming: dict[int, list[int]] = defaultdict(list)  # numbers of targets
        for move in moves:
            if move.dst != ends.rank or (move.name, move.into) not in ends.shared:
                self._add(move, is_replica=False)
        for move in replicas:
            self._add(move, is_replica=True)
        layout = ends.source.layout(ends.rank) if ends.source is not None else None
        self._shapes = {piece.name: piece.shape for piece in layout.pieces} if layout else {}

    @torch.no_grad()
    def compare(self, group: dist.ProcessGroup | None) -> Verification:
        """Compare what the sink holds now with what the sources hold.

        Ranks: every rank that the plan names, together.
        Blocks: until this rank's digests are sent and received; the group's timeout ends it.
        """
        clock = _Clock(self._ends.device)
        sums = self._digest_boxes()
        expected = self._expected(sums, group)
        found = self._ends.sink.digest() if self._ends.sink is not None else {}
        expectations, own = (values.tolist() for values in (expected, sums))
        mismatches, num_equal, num_unknown, smallest = [], 0, 0, Target("", Box((), ()), None)
        for target, value in zip(self._compared, expectations, strict=True):
            held = found.get((target.name, target.box)) if target.own is None else own[target.own]
            if held is None:
                num_unknown += 1
                continue
            if (held - value) % MODULUS:
                mismatches.append(self._mismatch(target))
            elif target.own is None:
                num_equal += 1
            if target.own is None and (not smallest.name or target.num_bytes < smallest.num_bytes):
                smallest = target
        return Verification(
            num_equal,
            len(mismatches),
            len(self._ends.shared),
            num_unknown,
            mismatches[:MAX_NAMED],
            smallest.name,
            clock.seconds(),
        )

    def _add(self, move: Move, is_replica: bool) -> None:
        rank, key = self._ends.rank, (move.name, move.box, move.dtype)
        if move.src == rank:
            box = self._boxes.setdefault(key, len(self._boxes))
            if move.dst != rank:
                self._outgoing[move.dst].append(box)
                return
        own = self._boxes.setdefault(key, len(self._boxes)) if is_replica else None
        number = self._target(move, own)
        target = self._compared[number]
        target.num_bytes += move.num_bytes
        if move.src not in target.sources:
            target.sources.append(move.src)
        if move.src == rank:
            self._local.append((box, number))
        else:
            self._incoming[move.src].append(number)

    def _target(self, move: Move, own: int | None) -> int:
        """Return the number of the comparison that a move is a part of."""
        key = (move.name, move.into) if own is None else (move.name, move.into, move.src)
        number = self._targets.setdefault(key, len(self._targets))
        if number == len(self._compared):
            self._compared.append(Target(move.name, move.into, own))
        return number

    def _digest_boxes(self) -> Tensor:
        """Return the digests of all boxes that this rank gives or compares as a replica."""
        views, dtypes, numbers = [], [], []
        sums = torch.zeros(len(self._boxes), dtype=torch.int64, device=self._ends.device)
        for (name, box, dtype), number in self._boxes.items():
            source, shape = self._ends.the_source(), self._shapes[name]
            view = source.view(name, box)
            if view is None:
                sums[number] = self._digest_read(name, shape, box, dtype)
            else:
                views.append(LocalTensor(shape, box, view))
                dtypes.append(dtype)
                numbers.append(number)
        if views:
            of_views = box_sums(views, dtypes).to(sums.device)
            if len(views) == len(sums):
                return of_views
            sums[_index(numbers, sums.device)] = of_views
        return sums

    def _digest_read(self, name: str, shape: Dims, box: Box, dtype: str) -> Tensor:
        out = torch.empty(box.extent, dtype=getattr(torch, dtype), device=self._ends.device)
        self._ends.the_source().read(name, box, out)
        return box_sums([LocalTensor(shape, box, out)], [dtype])[0]

    def _expected(self, sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Return the sum of the sources' digests for each comparison."""
        device = sums.device
        expected = torch.zeros(len(self._compared), dtype=torch.int64, device=device)
        sends = {
            peer: sums[_index(boxes, device)] for peer, boxes in sorted(self._outgoing.items())
        }
        receives = {
            peer: torch.empty(len(numbers), dtype=torch.int64, device=device)
            for peer, numbers in sorted(self._incoming.items())
        }
        send_and_receive(sends, receives, group)
        if self._local:
            boxes, numbers = zip(*self._local, strict=True)
            expected.index_add_(0, _index(numbers, device), sums[_index(boxes, device)])
        for peer, received in receives.items():
            expected.index_add_(0, _index(self._incoming[peer], device), received)
        return expected

    def _mismatch(self, target: Target) -> WeightMismatch:
        is_replica = target.own is not None
        return WeightMismatch(
            target.name, target.box, self._ends.rank, sorted(target.sources), is_replica
        )


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


def _index(numbers: Sequence[int], device: torch.device) -> Tensor:
    return upload(np.array(numbers, dtype=np.int64), device)

"""Messages between a rank and its SGLang child, besides those that carry weights."""

from __future__ import annotations

from typing import Any

from spmd_rl.weights.plan.layout import Box, Piece
from spmd_rl.weights.slab.peer_socket import PeerMessage


class ChildSpec(PeerMessage, tag=True, frozen=True):
    """All that the child is started with.

    `server_args` and `port_args` are the fields of SGLang's classes of these names. `tp_rank` is
    the scheduler's rank in its tensor-parallel group. `fields` are those of our mirrors, which must
    begin the fields of SGLang's structs.
    """

    versions: list[str]
    server_args: dict[str, Any]
    port_args: dict[str, Any]
    gpu_id: int
    tp_rank: int
    fields: dict[str, list[str]]


class ChildReady(PeerMessage, tag=True, frozen=True):
    """The scheduler runs. `seconds` says how long each part of the start took."""

    version: str
    max_num_tokens: int
    seconds: dict[str, float]


class PushedPieces(PeerMessage, tag=True, frozen=True):
    """What pushes will bring: the scheduler's box of each tensor."""

    pieces: list[Piece]


class WeightDigests(PeerMessage, tag=True, frozen=True):
    """Digests of what the scheduler's parameters hold.

    `received` names tensors whose digest is that of the bytes which came, because the child knows
    no view of a parameter that holds them.
    """

    digests: list[tuple[str, Box, int]]
    received: list[str]


class CallDone(PeerMessage, tag=True, frozen=True):
    """A call that the first rank of the group began is done in this rank's scheduler."""

    method: str


MESSAGES = (ChildSpec, ChildReady, PushedPieces, WeightDigests, CallDone)

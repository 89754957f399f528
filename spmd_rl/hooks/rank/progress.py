"""Progress of an episode: what it has drawn and kept, from which a later run of it goes on.

An episode that is aborted, or whose process or rank has ended, begins again from its start. It is
then given each turn that was drawn for the same tokens and limits, and each result that it had
kept. So nothing is drawn twice, and an episode whose other steps are deterministic goes on where it
was.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from spmd_rl.controller.channel.codec import Codec
from spmd_rl.errors import ContractError
from spmd_rl.hooks.transcript import Turn, TurnLimits
from spmd_rl.hooks.wire.channel import MessageReader, encode
from spmd_rl.hooks.wire.messages import AskTurn
from spmd_rl.types.token_data import TokenData


class TurnKey(NamedTuple):
    """What an episode asked the engine: a transcript, the tokens so far, and the limits."""

    transcript: int
    digest: bytes  # of the tokens
    limits: TurnLimits

    @staticmethod
    def of(message: AskTurn) -> TurnKey:
        digest = blake2b(message.past.tokens.tobytes())
        if message.context is not None:
            digest.update(b"after" + message.context.tobytes())
        return TurnKey(message.transcript, digest.digest(), message.limits)


class _DrawnTurn(msgspec.Struct, frozen=True, array_like=True):
    """A turn, or the tokens `begun` of one that the engine has not finished."""

    transcript: int
    digest: bytes
    limits: TurnLimits
    turn: Turn | None = None
    begun: TokenData | None = None

    @property
    def key(self) -> TurnKey:
        return TurnKey(self.transcript, self.digest, self.limits)


class _Record(msgspec.Struct, frozen=True, array_like=True):
    turns: list[_DrawnTurn]
    results: dict[str, bytes]


_CODEC: Codec = Codec(_Record, functions=False, repeats=False)


class Progress:
    """Turns by what was asked for, the beginnings of others, and results by their name."""

    def __init__(self) -> None:
        self.turns: dict[TurnKey, Turn] = {}
        self.begun: dict[TurnKey, TokenData] = {}
        self.results: dict[str, bytes] = {}

    def encoded(self, begun: Mapping[TurnKey, TokenData]) -> bytes:
        """Return it as bytes, with `begun` of turns that are drawn now; b"" if there is nothing."""
        turns = [_DrawnTurn(*key, turn) for key, turn in self.turns.items()]
        parts = {key: data for key, data in {**self.begun, **begun}.items() if len(data)}
        turns += [_DrawnTurn(*key, None, data) for key, data in parts.items()]
        return encode(_Record(turns, self.results)) if turns or self.results else b""

    @staticmethod
    def decoded(data: bytes) -> Progress:
        """Return what `encoded` made bytes of. Raises: ContractError for other bytes."""
        progress = Progress()
        if not data:
            return progress
        records = MessageReader(_CODEC).feed(data)
        if len(records) != 1:
            raise ContractError("an aborted sample holds something else than an episode's progress")
        for one in records[0].turns:
            if one.turn is not None:
                progress.turns[one.key] = one.turn
            elif one.begun is not None:
                progress.begun[one.key] = one.begun
        progress.results = dict(records[0].results)
        return progress

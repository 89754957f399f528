"""Turn sources: what draws the turns of a session. An episode asks its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from spmd_rl.gateway.dialects.request import Refused, ReplyRequest, TokenScores
from spmd_rl.hooks.child.episode_engine import EpisodeEngine, RefusedTurn
from spmd_rl.hooks.transcript import Transcript, Turn


class SourceTurn(NamedTuple):
    """A turn, and what a server knows besides.

    `num_cached` tokens of its prompt were not computed. `scores` are those that were asked for.
    """

    turn: Turn
    num_cached: int = 0
    scores: TokenScores | None = None


class TurnSource(Protocol):
    """Draws one turn after another, several at once."""

    async def draw(
        self,
        transcript: Transcript,
        asked: ReplyRequest,
        max_tokens: int | None,
        on_tokens: Callable[[list[int]], None] | None,
    ) -> SourceTurn:
        """Draw what follows a transcript, to which the turn is appended, and return it.

        `max_tokens` is the limit of `asked` as far as the context has room; None where the client
        named none. `on_tokens` is called in the event loop with new token ids while they are drawn.
        The transcript has a place afterwards.
        Blocks: until the turn is drawn. When the waiting task is cancelled, drawing stops.
        Raises: Refused for what the engine does not take; SpmdError with the reason when there is
        no turn.
        """
        ...


class EpisodeTurnSource:
    """Draws the turns of an episode from its engine, with the sampling of the recipe."""

    def __init__(self, engine: EpisodeEngine) -> None:
        self._engine = engine

    async def draw(
        self,
        transcript: Transcript,
        asked: ReplyRequest,
        max_tokens: int | None,
        on_tokens: Callable[[list[int]], None] | None,
    ) -> SourceTurn:
        try:
            turn = await self._engine.complete(
                transcript,
                max_tokens,
                asked.stops or None,
                stop_ids=asked.stop_ids,
                on_tokens=on_tokens,
            )
        except RefusedTurn as error:
            raise Refused("", str(error)) from error
        return SourceTurn(turn)

"""A call that draws one reply, and the clients that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from spmd_rl.gateway.dialects.asked import Asked, Begun, Drawn
from spmd_rl.gateway.replies import ReplyPiece


class ReplyCall:
    """One reply while it is drawn. A client that asks again for the same reply joins the call.

    When the last client has left before the end, the call is given up. `num_claims` counts the
    clients that wait for the answer, and those that got it.
    """

    def __init__(self, asked: Asked, num_bytes: int) -> None:
        self.asked, self.num_bytes = asked, num_bytes  # of the request
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[Begun] = loop.create_future()
        self.task: asyncio.Task[Drawn]
        self._pieces: list[ReplyPiece] = []
        self._waiting: set[asyncio.Future[None]] = set()
        self._num_clients = self.num_claims = 0

    def start(self, task: asyncio.Task[Drawn]) -> None:
        """Take the task that draws the reply."""
        self.task = task
        task.add_done_callback(self._ended)

    def join(self) -> None:
        self._num_clients += 1
        self.num_claims += 1

    def leave(self, *, answered: bool) -> bool:
        """Note that a client does not wait any more; return whether nobody waits for the rest."""
        self._num_clients -= 1
        self.num_claims -= not answered
        return self._num_clients == 0 and not self.task.done()

    def add(self, pieces: Iterable[ReplyPiece]) -> None:
        """Hand new pieces of the reply to those who read it as a stream."""
        self._pieces += pieces
        self._wake()

    async def pieces(self, heartbeat_s: float) -> AsyncIterator[ReplyPiece | None]:
        """Yield the pieces as they come, and None where none came for so long.

        Blocks: until the call has ended.
        """
        at = 0
        while True:
            while at < len(self._pieces):
                yield self._pieces[at]
                at += 1
            if self.task.done():
                return
            if not await self._changed(heartbeat_s):
                yield None

    async def _changed(self, within_s: float) -> bool:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            done, _ = await asyncio.wait([future], timeout=within_s)
        finally:
            self._waiting.discard(future)
        return bool(done)

    def _ended(self, _: Any) -> None:
        if not self.begun.done():
            self.begun.cancel()
        self._wake()

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

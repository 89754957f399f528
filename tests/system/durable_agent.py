"""Episodes of two turns and a tool that can go on half-played: in process, and over HTTP.

The tool is slow beside a turn, so that kills meet episodes between their turns too.
"""

from __future__ import annotations

import asyncio

import spmd_rl as rl
from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.gateway.process import Gateway
from spmd_rl.hooks.program import Site
from tests.dist.recipes.over_http import generate


async def solve(ctx: rl.HookContext, prompt: rl.Prompt, engine: rl.EpisodeEngine) -> rl.Sample:
    """Draw a turn, ask the tool, and draw another."""
    transcript = rl.Transcript(prompt)
    turn = await engine.complete(transcript)
    answer = await ctx.once("tool", lambda: ask_tool(turn.data.tokens.tolist()))
    transcript.observe(await engine.encode(answer))
    await engine.complete(transcript)
    return transcript.sample()


async def ask_tool(ids: list[int]) -> str:
    """Return a number that depends on what was said."""
    await asyncio.sleep(0.005)
    return f"={sum(ids) % 10};"


class SolveOverHttp:
    """The same episode as a client that reaches the policy over HTTP alone."""

    async def open(self, site: Site) -> None:
        self._texts = site.texts
        self._gateway = await Gateway(GatewayConfig(), site).__aenter__()

    async def play(
        self, ctx: rl.HookContext, prompt: rl.Prompt, engine: rl.EpisodeEngine
    ) -> list[rl.Sample]:
        session = self._gateway.open(ctx, prompt, engine)
        try:
            ids = prompt.tokens.tolist()
            turn = await generate(session.root_url, session.key, ids, [])
            answer = await ctx.once("tool", lambda: ask_tool(turn))
            ids += turn + self._texts.encode(answer)
            await generate(session.root_url, session.key, ids, [])
            return session.samples()
        finally:
            session.close()

    async def close(self) -> None:
        await self._gateway.__aexit__(None, None, None)

"""The calculator's episode in process, and as a program that reaches the policy over HTTP alone.

A session ends with what was drawn, so neither observes what follows the last turn.
"""

from __future__ import annotations

import asyncio
import json

import spmd_rl as rl
from examples.calculator.hooks import CALL, MAX_TURNS, calculate
from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.gateway.process import Gateway
from spmd_rl.hooks.program import Site


async def solve(ctx: rl.HookContext, prompt: rl.Prompt, engine: rl.EpisodeEngine) -> rl.Sample:
    """Let the model write until it answers, or has had its turns."""
    transcript = rl.Transcript(prompt)
    for number in range(MAX_TURNS):
        turn = await engine.complete(transcript, stop=["]"])
        call = CALL.fullmatch(turn.text)
        if call is None or number == MAX_TURNS - 1:
            break
        transcript.observe(await engine.encode(f"={calculate(call[1])};"))
    return transcript.sample()


class CalculatorOverHttp:
    """Episodes in which the model may call a calculator, by token ids on the wire."""

    async def open(self, site: Site) -> None:
        self._texts = site.texts
        self._gateway = await Gateway(GatewayConfig(), site).__aenter__()

    async def play(
        self, ctx: rl.HookContext, prompt: rl.Prompt, engine: rl.EpisodeEngine
    ) -> list[rl.Sample]:
        session = self._gateway.open(ctx, prompt, engine)
        try:
            ids = prompt.tokens.tolist()
            for _ in range(MAX_TURNS):
                drawn = await generate(session.root_url, session.key, ids, ["]"])
                ids += drawn
                call = CALL.fullmatch(self._texts.decode(drawn, skip_special_tokens=True))
                if call is None:
                    break
                ids += self._texts.encode(f"={calculate(call[1])};")
            return session.samples()
        finally:
            session.close()

    async def close(self) -> None:
        await self._gateway.__aexit__(None, None, None)


async def generate(url: str, key: str, ids: list[int], stop: list[str]) -> list[int]:
    """Draw a turn over a connection of its own."""
    body = json.dumps({"token_ids": ids, "sampling_params": {"stop": stop}}).encode()
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /inference/v1/generate HTTP/1.1\r\nhost: {host}\r\nx-api-key: {key}\r\n"
    head += f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read(-1)
    writer.close()
    told = json.loads(answer.partition(b"\r\n\r\n")[2])
    found: list[int] = told["choices"][0]["token_ids"]
    return found

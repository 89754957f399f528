"""Processor time and memory of the gateway: by token ids, by chat, and in a long conversation.

    python -m benchmarks.gateway --save

The gateway runs in a process of its own, beside an engine that answers at once, so that what is
measured is the server alone. Clients are raw connections that stay open. Times are of the
processor, because the machine may be busy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import finish, measured
from benchmarks.table import Row

MODEL = Path(__file__).parents[1] / "examples" / "math" / "model"
TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' + (call.function | tojson) }}"
    "{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SAID = "I see that the sum of these numbers is what was asked for here."
NUM_CONNECTIONS = 64
WATCH_S = 0.005
SHORT = {"messages": [{"role": "user", "content": "."}]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does something with a text, which is long enough to be told apart.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }
    for name in ("search", "read", "write")
]


def model_folder(folder: Path) -> str:
    """Make a model folder with a long context and a template that takes tools."""
    shutil.copytree(MODEL, folder)
    for name, more in (
        ("config.json", {"max_position_embeddings": 1 << 18}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
    ):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
    return str(folder)


class InstantEngine:
    """An engine that has drawn every turn before."""

    def __init__(self, texts: Any) -> None:
        from spmd_rl.hooks.transcript import TranscriptPlace, Turn
        from spmd_rl.types.token_data import TokenData

        ids = np.array([*texts.encode(SAID), texts.eos_ids[0]], np.int32)
        rng = np.random.default_rng(0)
        logprobs = -rng.random(len(ids)).astype(np.float32)
        self._turn = Turn(TokenData(ids, logprobs, np.zeros(len(ids), np.int32)), SAID)
        self._place, self._num = TranscriptPlace, 0

    async def complete(self, transcript: Any, *_: Any, **__: Any) -> Any:
        if transcript.place is None:
            transcript.place = self._place(self._num, self._num, 1.0)
            self._num += 1
        transcript.append(self._turn)
        return self._turn


async def serve(folder: str, num_sessions: int) -> None:
    """Serve sessions until the input ends; each line of it is answered with time and memory."""
    from spmd_rl.gateway.config import GatewayConfig
    from spmd_rl.gateway.dialects.request import SamplingRules
    from spmd_rl.gateway.process import Gateway
    from spmd_rl.hooks.context import HookContext
    from spmd_rl.hooks.program import Site
    from spmd_rl.hooks.texts import EpisodeTexts
    from spmd_rl.types.prompts import Prompt

    texts = EpisodeTexts.of_folder(folder)
    config = GatewayConfig(response_template="hermes", max_waiting=NUM_CONNECTIONS)
    async with Gateway(config, Site({}, 0, folder, texts)) as gateway:
        prompt = Prompt(0, np.array([1], np.int32))
        rules = SamplingRules(1.0)

        def opened() -> Any:
            return gateway.open(HookContext(), prompt, InstantEngine(texts), rules)  # type: ignore[arg-type]

        before = rss_bytes()
        session, *others = [opened() for _ in range(num_sessions)]
        growth = (rss_bytes() - before) / num_sessions
        tell(port=int(gateway.root_url.rpartition(":")[2]), key=session.key, session_bytes=growth)
        loop = asyncio.get_running_loop()
        lags: list[float] = []
        watch = asyncio.ensure_future(watch_loop(lags))
        while await loop.run_in_executor(None, sys.stdin.readline):
            tokens = sum(one.num_prompt - one.num_cached + one.num_drawn for one in session.records)
            late_s = float(np.quantile(lags, 0.99)) if lags else 0.0
            tell(cpu_s=time.process_time(), rss=rss_bytes(), tokens=tokens, lag_s=late_s)
            lags.clear()
        watch.cancel()
        assert others is not None and "torch" not in sys.modules


async def watch_loop(lags: list[float]) -> None:
    """Note by how much the loop wakes up late."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(WATCH_S)
        lags.append(time.perf_counter() - before - WATCH_S)


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


class Child:
    """The process of the gateway."""

    def __init__(self, process: asyncio.subprocess.Process, facts: dict[str, Any]) -> None:
        self._process = process
        self.port, self.key = facts["port"], facts["key"]
        self.session_bytes = facts["session_bytes"]
        self.lag_s = 0.0  # of the last calls

    @staticmethod
    async def start(folder: str, num_sessions: int) -> Child:
        command = [sys.executable, "-m", "benchmarks.gateway", "--serve", folder]
        process = await asyncio.create_subprocess_exec(
            *command,
            str(num_sessions),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        return Child(process, json.loads(await process.stdout.readline()))

    async def facts(self) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return json.loads(await self._process.stdout.readline())

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def cost_ms(self, path: str, body: Callable[[int], Any], num_calls: int) -> float:
        """Return the processor time of a call, of many that many connections make at once."""
        await self._calls(path, body, range(-NUM_CONNECTIONS, 0))  # warm
        before = await self.facts()
        await self._calls(path, body, range(num_calls))
        after = await self.facts()
        self.lag_s = after["lag_s"]
        return 1000 * (after["cpu_s"] - before["cpu_s"]) / num_calls

    async def _calls(self, path: str, body: Callable[[int], Any], numbers: range) -> None:
        left = iter(numbers)

        async def client() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            for number in left:
                data = json.dumps(body(number)).encode()
                head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.key}\r\n"
                writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
                answer = await reader.readuntil(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200"), (answer, await reader.read(500))
                size = answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(size))
            writer.close()

        await asyncio.gather(*(client() for _ in range(NUM_CONNECTIONS)))


def conversation(number: int, num_messages: int, size: int) -> dict[str, Any]:
    """Return a chat request that goes on from nothing the session holds."""
    text = ("The quick brown fox adds 12 and 30. " * size)[: size - 12]
    messages = [
        {"role": ("user", "assistant")[at % 2], "content": f"{number:8d} {at:2d} {text}"}
        for at in range(num_messages - 1)
    ]
    return {"messages": [{"role": "system", "content": "You add."}, *messages], "tools": TOOLS}


async def measure(num_calls: int) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as parent:
        folder = model_folder(Path(parent) / "model")
        child = await Child.start(folder, 64)
        cost = await child.cost_ms("/v1/messages/count_tokens", lambda _: SHORT, num_calls)
        rows.append(measured("a call that counts three tokens: the least", cost, "ms"))
        empty = await child.facts()
        ids = np.random.default_rng(0).integers(0, 256, 2000).tolist()
        cost = await child.cost_ms(
            "/inference/v1/generate", lambda n: {"token_ids": [n % 400, *ids, n % 300]}, num_calls
        )
        rows.append(measured("a call of 2,000 token ids: processor time", cost, "ms", at_most=0.4))
        rows.append(measured("such calls a processor second", 1000 / cost, "", at_least=2500))
        after = await child.facts()
        held = (after["rss"] - empty["rss"]) / (after["tokens"] - empty["tokens"])
        cost = await continued_ms(child, conversation(-1, 10, 740), num_calls)
        rows.append(measured("a chat call, 12 messages, 9 KB", cost, "ms", at_most=1.0))
        rows.append(measured("chat calls a processor second", 1000 / cost, "", at_least=1500))
        rows.append(measured("memory of a gateway", empty["rss"] / 2**20, "MiB", at_most=150))
        rows.append(measured("memory of a token, in calls of 2,000", held, "bytes", at_most=16))
        await child.end()
        child = await Child.start(folder, 4096)
        rows.append(measured("memory of a session", child.session_bytes / 1024, "KiB", at_most=20))
        rows += await long_conversation(child, num_calls)
        await child.end()
    return rows


async def continued_ms(child: Child, first: dict[str, Any], num_calls: int) -> float:
    """Return the processor time of calls that go on from a conversation that is held."""
    first["messages"].append({"role": "user", "content": "And now?"})
    await child._calls("/v1/chat/completions", lambda _: first, range(1))
    held = [*first["messages"], {"role": "assistant", "content": SAID}]

    def body(number: int) -> dict[str, Any]:
        asked = {"role": "user", "content": f"What is {number}?"}
        return {"messages": [*held, asked], "tools": TOOLS}

    return await child.cost_ms("/v1/chat/completions", body, num_calls)


async def long_conversation(child: Child, num_calls: int) -> list[Row]:
    """Measure calls that go on from 64,000 tokens that the session holds."""
    cost = await continued_ms(child, conversation(-1, 40, 2000), max(num_calls // 10, 64))
    return [
        measured("a chat call after a long conversation, 80 KB", cost, "ms", at_most=3.0),
        measured(
            "the loop is late by (p99), 64 calls at once", 1000 * child.lag_s, "ms", at_most=50
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve[0], int(args.serve[1])))
        return 0
    rows = asyncio.run(measure(args.calls))
    packages = ["uvicorn", "httptools", "transformers"]
    return finish(__file__, packages, rows, save=args.save, rooms=["gateway"])


if __name__ == "__main__":
    sys.exit(main())

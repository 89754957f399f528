"""Tools of an episode: they keep their state, have limits, see nothing, and leave nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.environments.environment import AgentReply
from spmd_rl.environments.tools.code_tools import CodeTools
from spmd_rl.environments.tools.sandbox_tools import TOOL_LIMITS, SandboxTools
from spmd_rl.errors import ConfigError
from spmd_rl.rewards.config import CodeConfig
from tests.laws.source import ROOT
from tests.unit.environments.cases import SpokenEngine, episode
from tests.unit.rewards.sandboxed import needs_sandbox

INTERRUPTED = (
    'Traceback (most recent call last):\n  File "<call>", line 1, in <module>\nKeyboardInterrupt'
)
LOST = "names and files are lost]"


def with_tools(use: Callable[[SandboxTools], Awaitable[Any]], **settings: Any) -> Any:
    """Return what a function makes of tools, which are closed after it."""

    async def main() -> Any:
        tools = SandboxTools(**{"call_s": 60.0} | settings)
        try:
            return await use(tools)
        finally:
            await tools.close()

    return asyncio.run(main())


def said(*calls: str, **settings: Any) -> list[str]:
    """Return what the calls say; those that begin with $ are of the shell."""

    async def use(tools: SandboxTools) -> list[str]:
        return [
            await (tools.shell(call[1:]) if call.startswith("$") else tools.python(call))
            for call in calls
        ]

    texts: list[str] = with_tools(use, **settings)
    return texts


@needs_sandbox
def test_names_and_files_live_as_long_as_the_episode() -> None:
    texts = said(
        "x = 3", "x + 1", "print(x)\nNone", "$echo seen > note; exit 3", "open('note').read()"
    )
    assert texts == ["", "4", "3", "exit code 3", "'seen\\n'"]
    assert "NameError" in said("x")[0]


@needs_sandbox
def test_an_error_is_shown_without_what_runs_the_call() -> None:
    (text,) = said("def f():\n    return 1 / 0\nf()")
    assert text.splitlines()[1:3] == [
        '  File "<call>", line 3, in <module>',
        '  File "<call>", line 2, in f',
    ]
    assert text.endswith("ZeroDivisionError: division by zero")
    assert said("exit()", "raise KeyboardInterrupt", "4") == ["", INTERRUPTED, "4"]


@needs_sandbox
@pytest.mark.parametrize(
    ("attack", "why"),
    [
        ("while True: pass", "it took longer than 2 s"),
        ("import time\ntime.sleep(600)", "it took longer than 2 s"),
        ("import os; os.kill(os.getpid(), 9)", "the program has ended"),
        ("import os; os._exit(0)", "the program has ended"),
        ("import os\nwhile True: os.write(answers, b'x' * 65536)", "it printed too much"),
        ("import os\nos.write(answers, b'[' * 9000 + b'\\n')", "the program has ended"),
        ("import os\nos.write(answers, b'{\"id\": 7}\\n')", "the program has ended"),
    ],
)
def test_an_attack_costs_its_own_session(attack: str, why: str) -> None:
    attack = f"import sys\nanswers = sys._getframe(2).f_globals.get('answers')\n{attack}"
    text, after = said(attack, "1 + 1", call_s=2.0)
    assert why in text
    assert text.endswith(LOST)
    assert after == "2"


@needs_sandbox
def test_forks_are_limited_and_answer_nothing() -> None:
    bomb = "import os\ntry:\n    while True: os.fork()\nexcept OSError:\n    print('no more')"
    assert said(bomb, "2 + 2", "$:(){ :|:& };:", "3 + 3")[1::2] == ["4", "6"]


@needs_sandbox
def test_long_output_is_cut() -> None:
    (text, other) = said("print('y' * 10**7)", "$yes | head -c 30000000", max_characters=50)
    assert text == "y" * 50 + "\n[the rest is left out]"
    assert other.startswith("y\ny\n")
    assert len(other) < 100
    assert "the most" in said("x = 1" + " " * 60_000)[0]


@needs_sandbox
def test_memory_and_files_are_limited() -> None:
    limits = CodeConfig(memory_mb=256, file_mb=1)
    texts = said("b'x' * (1 << 30)", "open('big', 'wb').write(b'x' * (1 << 22))", limits=limits)
    assert "MemoryError" in texts[0]
    assert "OSError" in texts[1]


@needs_sandbox
def test_nothing_of_the_run_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    (tmp_path / "config.toml").write_text("hush")
    hidden = [str(tmp_path / "config.toml"), "/etc/passwd", str(ROOT / "setup.py")]
    texts = said(
        f"import os; [os.path.exists(path) for path in {hidden!r}]",
        "$env",
        "import socket; socket.create_connection(('127.0.0.1', 22), 2)",
        f"$ls /proc/{os.getpid()}",
    )
    assert texts[0] == "[False, False, False]"
    assert "hush" not in texts[1]
    assert "RANK" not in texts[1]
    assert "OSError" in texts[2] or "Error: [Errno" in texts[2]
    assert "exit code" in texts[3]


@pytest.mark.parametrize(
    ("reply", "ran"),
    [
        (AgentReply("```python\n1\n```"), ["1\n"]),
        (AgentReply("5", thought="```python\n1\n```"), []),
        (AgentReply("```python\n1\n```", "truncated"), []),
    ],
)
def test_code_of_a_reply_is_run_and_none_of_its_thought(
    reply: AgentReply, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    async def python(self: SandboxTools, code: str) -> str:
        calls.append(code)
        return "1"

    monkeypatch.setattr(SandboxTools, "python", python)
    seen = asyncio.run(CodeTools().step(reply))
    assert (calls, seen.done) == (ran, not ran)


def children() -> set[str]:
    task = Path(f"/proc/{os.getpid()}/task")
    return {child for one in task.iterdir() for child in (one / "children").read_text().split()}


@needs_sandbox
def test_nothing_lives_longer_than_the_episode() -> None:
    before = children()

    async def use(tools: SandboxTools) -> int:
        assert await tools.shell("nohup sleep 1000 > /dev/null 2>&1 & echo on") == "on"
        return len(children() - before)

    assert with_tools(use) == 1
    assert children() <= before


@needs_sandbox
def test_a_policy_uses_code_and_then_answers() -> None:
    engine = SpokenEngine(
        ["```python\nx = 6 * 7\nx\n```", "```sh\necho $((1 + 1))\n```", "it is 42"]
    )
    (sample,) = episode(CodeTools(call_s=60.0), engine)
    contents = [one["content"] for one in sample.messages if one["role"] == "user"]
    assert contents == ["42", "2"]
    assert sample.answer == "it is 42"
    assert sample.reward == 0.0


@pytest.mark.parametrize(
    "settings", [{"call_s": 0.0}, {"max_characters": 0}, {"limits": CodeConfig(command=("sh",))}]
)
def test_limits_without_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SandboxTools(**{"limits": TOOL_LIMITS} | settings)

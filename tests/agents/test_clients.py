"""Clients and agents that nobody here wrote, unmodified, solve a task with a tool over HTTP."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the extra 'agents' is not installed")

from tests.unit.gateway.exact import check_exact
from tests.unit.gateway.serving import END, serving

pytestmark = pytest.mark.agents
PROGRAMS = Path(__file__).parent / "programs"
PLAY_S = 240  # the last resort
SUM = "80235"
CALL = '<call>{"name": "add", "arguments": {"a": 12345, "b": 67890}}</call>'
FINAL = '<call>{"name": "final_answer", "arguments": {"answer": "80235"}}</call>'


def policy(prompt: str) -> str:
    """What the policy draws: a call, and the sum once the prompt has it."""
    if SUM not in prompt:
        return "I add. " + CALL + END
    return (FINAL if "final_answer" in prompt else f"It is {SUM}.") + END


async def played(python: str, program: str, way: str) -> tuple[str, int, list[str]]:
    """Run a program against a gateway; return what it said, its samples, and the reasons."""
    async with serving(policy) as served:
        session = served.session
        given = session.base_url, session.root_url, session.key, way
        child = await asyncio.create_subprocess_exec(
            python,
            str(PROGRAMS / f"{program}.py"),
            *given,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp")},
        )
        try:
            out, problem = await asyncio.wait_for(child.communicate(), PLAY_S)
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        assert child.returncode == 0, problem.decode()[-2000:]
        check_exact(session, served.engine)
        reasons = [one.reason for one in session.records]
        return out.decode().strip(), len(session.samples()), reasons


@pytest.mark.parametrize(
    ("program", "way"),
    [
        ("openai_chat", "whole"),
        ("openai_chat", "streamed"),
        ("openai_responses", "whole"),
        ("openai_responses", "streamed"),
        ("anthropic_messages", "whole"),
        ("anthropic_messages", "streamed"),
        ("openai_agents", "responses"),
        ("openai_agents", "chat"),
        ("lang_graph", "whole"),
    ],
)
def test_a_client_holds_one_conversation(clients: str, program: str, way: str) -> None:
    said, num_samples, reasons = asyncio.run(played(clients, program, way))
    assert SUM in said
    assert (num_samples, reasons) == (1, ["new", "extends"])


def test_an_agent_that_rewrites_its_turns_has_a_sample_for_each(clients: str) -> None:
    said, num_samples, reasons = asyncio.run(played(clients, "smol", "whole"))
    assert SUM in said
    assert num_samples == len(reasons) == 2

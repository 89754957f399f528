"""Environments of an OpenEnv server: the package's own echo server, unmodified, and servers that
fail.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("websockets", reason="the extra 'openenv' is not installed")

from websockets.asyncio.server import serve

from spmd_rl.environments.config import AgentConfig
from spmd_rl.environments.make import environment_maker
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.types.samples import TURN_RECORDS, Sample
from tests.agents.test_training import check_bits, longer_model, write
from tests.dist.recipes.conftest import run_in
from tests.unit.environments.cases import EpisodeLimits, SpokenEngine, chat_prompt, episode, play
from tests.unit.environments.test_openenv_parts import agent

pytestmark = pytest.mark.agents
READY = '{"echoed_message": "My Echo environment ready!", "message_length": 0}'


def test_an_episode_is_that_of_the_server(echo_server: str) -> None:
    engine = SpokenEngine(["hello", "to you"])
    (sample,) = episode(agent(echo_server), engine, limits=EpisodeLimits(2))
    turns = sample.metadata[TURN_RECORDS]
    assert [turn["reward"] for turn in turns] == pytest.approx([0.5, 0.6])
    assert sample.reward == pytest.approx(1.1)
    assert len({turn["state"] for turn in turns}) == 2
    assert f"begin\n\n{READY}" in engine.pasts[0]
    assert [one["content"] for one in sample.messages] == [
        "hello",
        '{"echoed_message": "hello", "message_length": 5}',
        "to you",
    ]


def test_the_state_of_the_server_names_that_of_the_world(echo_server: str) -> None:
    def states(said: list[str], fields: list[str]) -> list[str]:
        made = agent(echo_server, observe="echoed_message", state=fields)
        (sample,) = episode(made, SpokenEngine(said), limits=EpisodeLimits(len(said)))
        return [turn["state"] for turn in sample.metadata[TURN_RECORDS]]

    assert states(["a", "b"], ["step_count"]) == states(["c", "d"], ["step_count"])
    assert states(["a", "b"], [])[1] != states(["c", "d"], [])[1]
    with pytest.raises(EpisodeFailure, match="has no 'board': it has episode_id, step_count"):
        states(["a"], ["board"])


def test_an_action_that_does_not_fit_is_the_fault_of_who_made_it(echo_server: str) -> None:
    with pytest.raises(EpisodeFailure, match="VALIDATION_ERROR") as failed:
        episode(agent(echo_server, act="mesage"), SpokenEngine(["hello"]))
    assert failed.value.kind == "environment"


def test_episodes_wait_for_a_place(echo_server: str) -> None:
    """The server has one place; a session that ends gives it back."""
    make = environment_maker(AgentConfig(kind="openenv", name=echo_server))

    async def both() -> list[list[Sample]]:
        rng, limits = np.random.default_rng(0), EpisodeLimits(1)
        engines = [SpokenEngine([text]) for text in ("one", "three")]
        return list(
            await asyncio.gather(
                *(play(make(), chat_prompt(), engine, limits, rng) for engine in engines)
            )
        )

    rewards = [sample.reward for (sample,) in asyncio.run(both())]
    assert rewards == pytest.approx([0.3, 0.5])


def test_an_episode_that_gets_no_place_has_failed(echo_server: str) -> None:
    held, other = agent(echo_server), agent(echo_server, place_s=0.2)

    async def both() -> None:
        try:
            await held.reset(chat_prompt(), np.random.default_rng(0))
            with pytest.raises(EpisodeFailure, match="no place came free") as failed:
                await other.reset(chat_prompt(), np.random.default_rng(0))
            assert failed.value.kind == "timeout"
        finally:
            await other.close()
            await held.close()

    asyncio.run(both())


Handler = Callable[[Any], Awaitable[None]]


async def hangs_up(socket: Any) -> None:
    await socket.recv()


async def is_silent(socket: Any) -> None:
    await socket.wait_closed()


def says(*answers: Any) -> Handler:
    async def handler(socket: Any) -> None:
        for answer in answers:
            await socket.recv()
            await socket.send(answer if isinstance(answer, str) else json.dumps(answer))
        await socket.recv()

    return handler


def observed(done: bool = False, reward: Any = None, **fields: Any) -> dict[str, Any]:
    data = {"observation": fields, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": "no"}}


def against(handler: Handler, said: list[str], **args: Any) -> Sample:
    """Play against a server of the test."""

    async def main() -> Sample:
        async with serve(handler, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            made = agent(f"ws://127.0.0.1:{port}", **args)
            rng = np.random.default_rng(0)
            (sample,) = await play(
                made, chat_prompt(), SpokenEngine(said), EpisodeLimits(len(said)), rng
            )
            return sample

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("handler", "kind", "problem"),
    [
        (hangs_up, "environment", "closed the connection"),
        (is_silent, "timeout", "reset did not answer within 0.2 s"),
        (says("no json"), "environment", "not OpenEnv's"),
        (says("[1]"), "environment", "not OpenEnv's"),
        (says({"type": "state", "data": {}}), "environment", "the answer is 'state'"),
        (says(error("EXECUTION_ERROR")), "environment", "EXECUTION_ERROR: no"),
        (says({"type": "observation", "data": {}}), "environment", "no observation"),
        (says(observed(reward="much")), "environment", "no observation"),
        (says(observed(done=True)), "environment", "over when it began"),
        (says(observed(), error("VALIDATION_ERROR")), "environment", "VALIDATION_ERROR"),
        (says(observed(), observed(reward=1e999)), "environment", "the reward inf"),
    ],
)
def test_a_failure_of_a_server_has_its_kind(handler: Handler, kind: str, problem: str) -> None:
    with pytest.raises(EpisodeFailure, match=problem) as failed:
        against(handler, ["x"], act="text", call_s=0.2 if handler is is_silent else 60.0)
    assert failed.value.kind == kind


def test_a_server_that_is_not_there_has_failed() -> None:
    with pytest.raises(EpisodeFailure, match="cannot connect") as failed:
        episode(agent("http://127.0.0.1:9", act="text"), SpokenEngine(["x"]))
    assert failed.value.kind == "environment"


def test_an_episode_ends_where_the_server_says_so() -> None:
    last = observed(done=True, reward=True, text="well done")
    sample = against(says(observed(text="go"), last), ["x", "y"], act="text")
    assert sample.reward == 1.0
    assert [one["content"] for one in sample.messages] == ["x"]


def test_the_policy_learns_to_say_more(roomy_server: str, tmp_path: Path) -> None:
    records = ({"prompt": "say much", "answer": str(number)} for number in range(8))
    ended = run_in(
        tmp_path,
        "grpo",
        f"--model={longer_model(tmp_path, 256)}",
        f"--data={write(tmp_path / 'echo.jsonl', records)}",
        "--reward=environment",
        "--prompts.chat_template=true",
        "--agent.kind=openenv",
        f"--agent.name={roomy_server}",
        '--agent.args={"observe": "echoed_message"}',
        "--agent.max_turns=1",
        "--trainer.init=random",
        "--trainer.lr=4e-3",
        "--steps=5",
        "--prompts_per_step=4",
        "--sampling.num_samples=8",
        "--sampling.max_tokens=24",
        small=False,
    )
    check_bits(ended)
    rewards = [row["reward/mean"] for row in ended.metrics]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards

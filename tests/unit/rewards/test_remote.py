"""The grader that asks a server: what it sends, what a reward is, and when it gives up."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.hooks.rank.tasks import Failed
from spmd_rl.rewards.remote import http
from spmd_rl.rewards.remote.http import ServerError
from spmd_rl.rewards.remote.remote import remote
from tests.unit.hooks.cases import make_sample
from tests.unit.rewards.graded import context, grade, make_prompt, run
from tests.unit.rewards.json_server import JsonServer, Reset, Silence


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.001)


def ask(server: JsonServer, **settings: Any) -> Any:
    ctx = context(remote={"url": f"{server.url}/grade", **settings})
    return run(remote(ctx, make_prompt({"level": 3}), make_sample("84")))


def test_a_server_is_told_of_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_TOKEN", "Bearer 123\n")  # as from a file
    with JsonServer(lambda number, asked: 0.5) as server:
        assert ask(server, headers_from={"Authorization": "GRADER_TOKEN"}) == 0.5
    ((path, body, headers),) = server.asked
    assert path == "/grade"
    assert body == {"prompt": "37+48=", "response": "84", "label": "85", "meta": {"level": 3}}
    assert headers["Authorization"] == "Bearer 123"


def test_a_server_is_told_of_all_turns_and_of_what_was_said_last() -> None:
    turns = [
        {"role": "assistant", "content": "<call>"},
        {"role": "tool", "content": "85"},
        {"role": "assistant", "content": "It is 84."},
    ]
    sample = make_sample("<call>85It is 84.").replace(metadata={"messages": turns})
    with JsonServer(lambda number, asked: 0.5) as server:
        run(remote(context(remote={"url": server.url}), make_prompt(), sample))
    ((_, body, _),) = server.asked
    assert body["response"] == "It is 84." and body["messages"] == turns


@pytest.mark.parametrize("value", ["secret\nX-Other: 1", "secret\xe9"])
def test_a_broken_secret_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("GRADER_TOKEN", value)
    with JsonServer(lambda number, asked: 0.5) as server:
        with pytest.raises(ConfigError, match="GRADER_TOKEN holds more than one line") as told:
            ask(server, headers_from={"Authorization": "GRADER_TOKEN"})
        assert server.asked == []
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (1, 1.0),
        (-2.5, -2.5),
        (True, 1.0),
        ({"reward": 0.5, "form": 1, "why": "short", "list": [1]}, {"reward": 0.5, "form": 1.0}),
    ],
)
def test_numbers_and_objects_are_rewards(answer: Any, reward: Any) -> None:
    with JsonServer(lambda number, asked: answer) as server:
        assert ask(server) == reward


@pytest.mark.parametrize(
    "trouble",
    [
        (500, "down"),
        (501, b"<html>"),
        (429, "later"),
        b"<html>no JSON",
        b"NaN",
        "0.5",
        None,
        [1.0],
        {"score": 1.0},
        {"reward": "1"},
        1e300,
        Reset(),
    ],
    ids=str,
)
def test_trouble_is_tried_again_and_never_is_a_reward(trouble: Any) -> None:
    with JsonServer(lambda number, asked: trouble if number < 2 else 1.0) as server:
        assert ask(server, retries=2) == 1.0
        assert len(server.asked) == 3
    with JsonServer(lambda number, asked: trouble) as server:
        with pytest.raises(ServerError, match="failed 3 times, at last: "):
            ask(server, retries=2)
        assert len(server.asked) == 3


@pytest.mark.parametrize("status", [301, 400, 401, 404, 422])
def test_a_request_that_is_refused_is_not_tried_again(status: int) -> None:
    with JsonServer(lambda number, asked: (status, "no such user")) as server:
        with pytest.raises(ServerError, match=rf"HTTP status {status}: '\"no such user\"'"):
            ask(server)
        assert len(server.asked) == 1


def test_a_server_that_says_nothing_meets_the_deadline() -> None:
    with (
        JsonServer(lambda number, asked: Silence()) as server,
        pytest.raises(ServerError, match=r"gave no answer in 0.3 s, at last: no answer yet"),
    ):
        ask(server, deadline_s=0.3)


def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 1000)
    with (
        JsonServer(lambda number, asked: b"1" * 2000) as server,
        pytest.raises(ServerError, match="an answer of more than 1000 bytes"),
    ):
        ask(server, retries=0)


def test_a_server_that_is_not_there_fails_the_sample() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        call = remote(context(remote={"url": url, "away_s": 0.05}), make_prompt(), make_sample())
        with pytest.raises(ServerError, match="was away for 0.05 s, at last: ConnectError"):
            run(call)


def test_the_pool_marks_a_sample_failed_and_grades_the_others() -> None:
    def answer(number: int, asked: Any) -> Any:
        return (500, "x") if asked.body["response"] == "bad" else len(asked.body["response"])

    with JsonServer(answer) as server:
        config = {"graders": {"remote": {"url": server.url, "retries": 1}}}
        events = grade("remote", make_prompt(), ["x", "bad", "xyz"], config)
    assert isinstance(events[1], Failed)
    assert "raised ServerError: http://127.0.0.1:" in events[1].error
    assert [events[n].grades["remote"][0].reward for n in (0, 2)] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "graders.remote.url = '': expected the address of your server"),
        ({"url": "http://x", "deadline_s": 200.0}, "less than hooks.deadline_s, which is 120"),
        (
            {"url": "http://x", "headers_from": {"Authorization": "NO_SUCH_TOKEN"}},
            "graders.remote.headers_from reads Authorization from the environment variable "
            "NO_SUCH_TOKEN, which is not set",
        ),
    ],
)
def test_a_run_does_not_start_with_settings_that_lack_something(
    settings: dict[str, Any], sentence: str
) -> None:
    config = {"graders": {"remote": settings}, "hooks": {"deadline_s": 120.0}}
    with pytest.raises(ConfigError, match=sentence):
        grade("remote", make_prompt(), ["x"], config)

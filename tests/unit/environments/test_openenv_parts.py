"""Rules by which texts become actions of an OpenEnv server, and observations messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.environments.openenv import (
    NoAction,
    OpenEnv,
    OpenEnvArgs,
    OpenEnvRules,
    only_text_field,
)
from spmd_rl.environments.openenv_session import OpenEnvServer, addresses_of
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.failures import EpisodeFailure

HERE = Path(__file__)
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


def agent(address: str, **args: Any) -> OpenEnv:
    """Return an environment of a server."""
    own = OpenEnvArgs(**args)
    return OpenEnv(OpenEnvServer(address, own.call_s, own.place_s), OpenEnvRules(own))


def shout(text: str) -> Any:
    if text == "wrong":
        return 7
    if not text:
        raise ValueError("say something")
    return {"message": text.upper()}


def tell(observation: dict[str, Any]) -> Any:
    return observation["said"]


@pytest.mark.parametrize(
    ("properties", "field"),
    [
        ({"message": TEXT, "metadata": {"type": "object"}}, "message"),
        ({"message": TEXT}, "message"),
        ({"move": NUMBER}, ""),
        ({"message": TEXT, "move": NUMBER}, ""),
        ({}, ""),
    ],
)
def test_a_text_is_the_only_field_of_an_action(properties: dict[str, Any], field: str) -> None:
    schema = {"properties": properties}
    assert only_text_field(schema) == field
    rules = OpenEnvRules(OpenEnvArgs())
    if field:
        assert rules.action("{}", schema) == ({field: "{}"}, False)
    else:
        assert rules.action('{"a": 1}', schema) == ({"a": 1}, True)


def test_a_schema_without_fields_asks_for_json() -> None:
    assert only_text_field({}) == ""


@pytest.mark.parametrize(
    "text", ['{"a": 1}', ' {"a": 1}\n', 'I move:\n```json\n{"a": 1}\n```', '```\n{"a": 1}\n``` so']
)
def test_json_may_be_fenced(text: str) -> None:
    assert OpenEnvRules(OpenEnvArgs()).action(text, {}) == ({"a": 1}, True)


@pytest.mark.parametrize("text", ["", "up", "[1]", "7", '{"a": 1', "[" * 100_000])
def test_what_is_no_json_object_is_no_action(text: str) -> None:
    with pytest.raises(NoAction, match="expected a JSON object"):
        OpenEnvRules(OpenEnvArgs()).action(text, {})


def test_a_setting_names_the_field_or_a_function() -> None:
    assert OpenEnvRules(OpenEnvArgs(act="code")).action("x", {}) == ({"code": "x"}, False)
    rules = OpenEnvRules(OpenEnvArgs(act=f"{HERE}:shout"))
    assert rules.action("up", {}) == ({"message": "UP"}, False)
    with pytest.raises(NoAction, match="say something"):
        rules.action("", {})
    with pytest.raises(EpisodeFailure, match="returned no table: 7"):
        rules.action("wrong", {})


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"text": "hello"}, "hello"),
        ({"text": "hello", "image": None}, "hello"),
        ({"text": "é", "size": 1}, '{"text": "é", "size": 1}'),
        ({"size": 1}, '{"size": 1}'),
        ({}, "{}"),
    ],
)
def test_an_observation_is_shown_whole(observation: dict[str, Any], text: str) -> None:
    assert OpenEnvRules(OpenEnvArgs()).observed(observation) == text


def test_a_setting_names_what_is_shown() -> None:
    rules = OpenEnvRules(OpenEnvArgs(observe="board"))
    assert rules.observed({"board": [1, 2], "text": "x"}) == json.dumps([1, 2])
    with pytest.raises(EpisodeFailure, match="has no 'board': it has text"):
        rules.observed({"text": "x"})
    messages = [{"role": "user", "content": "look"}]
    own = OpenEnvRules(OpenEnvArgs(observe=f"{HERE}:tell"))
    assert own.observed({"said": "x"}) == "x"
    assert own.observed({"said": messages}) == tuple(messages)
    with pytest.raises(EpisodeFailure, match="neither a text nor messages"):
        own.observed({"said": 7})
    with pytest.raises(EpisodeFailure, match="agent.args.observe raised KeyError"):
        own.observed({})


@pytest.mark.parametrize(
    ("address", "both"),
    [
        ("http://127.0.0.1:80/", ("http://127.0.0.1:80", "ws://127.0.0.1:80/ws")),
        ("https://a.b/env", ("https://a.b/env", "wss://a.b/env/ws")),
        ("ws://[::1]:8000", ("http://[::1]:8000", "ws://[::1]:8000/ws")),
    ],
)
def test_an_address_is_of_http_and_of_a_socket(address: str, both: tuple[str, str]) -> None:
    assert addresses_of(address) == both


@pytest.mark.parametrize("address", ["my_echo", "localhost:80", "ftp://a", "http://", "http://a?b"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"such as http://127\.0\.0\.1:8000"):
        addresses_of(address)


@pytest.mark.parametrize(
    ("args", "problem"), [({"call_s": 0}, "call_s"), ({"place_s": -1}, "place_s")]
)
def test_settings_without_sense_are_refused(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        OpenEnvArgs(**args)

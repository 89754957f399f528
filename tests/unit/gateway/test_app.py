"""The gateway over HTTP: dialects, keys, streams, limits and attacks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="the extra 'agents' is not installed")

from spmd_rl.errors import ConfigError
from spmd_rl.gateway import app
from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.hooks.child.episode_engine import RefusedTurn
from tests.unit.gateway.fakes import FakeTexts
from tests.unit.gateway.serving import END, HELLO, Served, read_answer, serving, with_gateway

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TOKENS = "/inference/v1/generate"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = '<call>{"name": "f", "arguments": {"x": 1}}</call>'


@with_gateway()
async def test_a_chat_call_and_its_tokens(served: Served) -> None:
    asked = HELLO | {"return_token_ids": True, "logprobs": True, "seed": 4}
    got = await served.post(CHAT, asked)
    assert got.status == 200, got.body
    assert got.headers["x-spmd-weights"] == "3"
    assert got.headers["x-spmd-ignored"] == "seed"
    (choice,) = got.json["choices"]
    assert choice["message"]["content"] == "yes"
    assert choice["finish_reason"] == "stop"
    (sample,) = served.session.samples()
    assert choice["token_ids"] == sample.tokens[sample.mask].tolist()
    told = np.float32([one["logprob"] for one in choice["logprobs"]["content"]])
    assert told.tobytes() == sample.logprobs[sample.mask].tobytes()
    assert choice["spmd"]["versions"] == [3] * len(choice["token_ids"])
    assert got.json["usage"]["prompt_tokens"] == len(got.json["prompt_token_ids"])


@pytest.mark.parametrize("dialect", [CHAT, MESSAGES, RESPONSES])
@with_gateway(lambda _: "one two three " + CALL + END)
async def test_a_stream_comes_while_tokens_are_drawn(served: Served, dialect: str) -> None:
    served.engine.gate = asyncio.Event()
    body: dict[str, Any] = HELLO | {"stream": True, "max_tokens": 99}
    if dialect == RESPONSES:
        body = {"input": "hello", "stream": True}
    reader, writer = await served.connect()
    data = json.dumps(body).encode()
    writer.write(served.head("POST", dialect, len(data)) + data)
    first = await reader.readuntil(b'"o"' if dialect != CHAT else b'"content":"o"')
    assert not served.session.samples(), "the turn is not complete"
    served.engine.gate.set()
    rest = await reader.read(-1)
    assert b" two" in first + rest
    end = {CHAT: b"[DONE]", MESSAGES: b"message_stop", RESPONSES: b"response.completed"}
    assert end[dialect] in rest
    writer.close()
    assert len(served.session.samples()) == 1


@with_gateway()
async def test_token_ids_over_the_wire(served: Served) -> None:
    body = {"token_ids": [1, 2, 90], "sampling_params": {"logprobs": 1}}
    first = (await served.post(TOKENS, body)).json["choices"][0]
    body = {"token_ids": [1, 2, 90, *first["token_ids"], 91]}
    assert (await served.post(TOKENS, body)).status == 200
    (sample,) = served.session.samples()
    assert sample.context.tolist() == [1, 2, 90]
    told = np.float32([one["logprob"] for one in first["logprobs"]["content"]])
    count = len(first["token_ids"])
    assert told.tobytes() == sample.logprobs[:count].tobytes()


@with_gateway(lambda _: "yes" + END)
async def test_a_completion_is_learned_as_tokens_are(served: Served) -> None:
    body = {"prompt": "the cat", "return_token_ids": True, "logprobs": 1, "stop": "s"}
    (choice,) = (await served.post("/v1/completions", body)).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ye", "stop")
    held = [*choice["prompt_token_ids"], *choice["token_ids"]]
    got = await served.post("/v1/completions", {"prompt": [*held, 91]})
    assert got.json["usage"]["prompt_tokens_details"]["cached_tokens"] == len(held)
    (sample,) = served.session.samples()
    assert sample.context.tolist() == choice["prompt_token_ids"]
    assert choice["logprobs"]["top_logprobs"] is None, "a run does not know the likeliest"
    told = np.float32(choice["logprobs"]["token_logprobs"])
    count = len(choice["token_ids"])
    assert told.tobytes() == sample.logprobs[:count].tobytes()
    several = (await served.post("/v1/completions", {"prompt": ["a", "b"]})).json
    assert [one["index"] for one in several["choices"]] == [0, 1]
    assert len(served.session.samples()) == 3


@with_gateway()
async def test_models_health_and_counted_tokens(served: Served) -> None:
    models = (await served.send("GET", "/v1/models")).json
    assert models["data"][0]["id"] == "tiny"
    assert models["data"][0]["max_model_len"] == 1 << 16
    assert (await served.send("GET", "/v1/models/a/b")).json["id"] == "tiny"
    assert (await served.send("GET", "/health", key="")).status == 200
    counted = await served.post(MESSAGES + "/count_tokens", HELLO)
    told = await served.post(MESSAGES, HELLO | {"max_tokens": 9})
    usage = told.json["usage"]
    assert counted.json["input_tokens"] == usage["input_tokens"]


@pytest.mark.parametrize("path", ["/v1/other", "/", "/s/KEY/v1/embeddings", "/v1/messages/batches"])
@with_gateway()
async def test_unknown_paths_and_methods_are_answered_in_json(served: Served, path: str) -> None:
    got = await served.post(path.replace("KEY", served.session.key), {})
    assert (got.status, got.headers["content-type"]) == (404, "application/json")
    assert "no endpoint has this path" in got.json["error"]["message"]
    assert served.session.key.encode() not in got.body
    if "messages" in path:
        assert got.json["type"] == "error"
        assert got.json["error"]["type"] == "not_found_error"
    for method, known in (("GET", CHAT), ("DELETE", MESSAGES), ("POST", "/v1/models")):
        got = await served.send(method, known)
        assert (got.status, got.headers["content-type"]) == (405, "application/json")
        assert method in got.json["error"]["message"] and got.headers["allow"]


@with_gateway(lambda _: 1 / 0)
async def test_a_fault_of_the_gateway_is_answered_in_json(served: Served) -> None:
    got = await served.post(CHAT, HELLO)
    assert (got.status, got.headers["content-type"]) == (500, "application/json")
    assert "division" not in got.json["error"]["message"]


@with_gateway()
async def test_metrics_in_the_format_of_prometheus(served: Served) -> None:
    before = await served.send("GET", "/metrics", key="")
    assert before.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert set(values(before).values()) == {0}
    usage = (await served.post(CHAT, HELLO)).json["usage"]
    served.engine.gate = asyncio.Event()
    waiting = asyncio.ensure_future(served.post(CHAT, HELLO))
    while len(served.engine.prompts) < 2:
        await asyncio.sleep(0)
    found = values(await served.send("GET", "/metrics", key=""))
    assert found['spmd_rl_requests_total{end="answered"}'] == 1
    assert found["spmd_rl_requests_open"] == 1
    assert found["spmd_rl_prompt_tokens_total"] == usage["prompt_tokens"]
    assert found["spmd_rl_generation_tokens_total"] == usage["completion_tokens"]
    served.engine.gate.set()
    await waiting
    found = values(await served.send("GET", "/metrics", key=""))
    assert found["spmd_rl_requests_open"] == 0


def values(page: Any) -> dict[str, float]:
    """The values of a page of Prometheus, by their names and labels."""
    lines = page.body.decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


@with_gateway()
async def test_keys(served: Served) -> None:
    other = served.gateway.open(
        served.session._ctx,
        served.session._prompt,
        served.engine,  # type: ignore[arg-type]
    )
    for key in ("", "x", "sk-" + "a" * 43, "a" * 5000, other.key[:-1]):
        got = await served.post(CHAT, HELLO, key)
        assert got.status == 401
        assert other.key.encode() not in got.body
    path = f"/s/{other.key}{CHAT}"
    assert (await served.post(path, HELLO, "EMPTY")).status == 200
    assert (await served.post(CHAT, HELLO, "", x_api_key=other.key)).status == 200
    assert len(other.samples()) == 2 and not served.session.samples()
    assert (await served.post(f"/s/wrong{CHAT}", HELLO)).status == 401
    other.close()
    assert (await served.post(CHAT, HELLO, other.key)).status == 401
    assert served.gateway.num_sessions == 1


@with_gateway()
async def test_a_named_key_goes_before_a_bearer_and_one_in_the_path_before_both(
    served: Served,
) -> None:
    """Anthropic's client with a key of its own may find a bearer in the environment."""

    key = served.session.key
    assert (await served.post(CHAT, HELLO, "other", x_api_key=key)).status == 200
    assert (await served.post(CHAT, HELLO, key, x_api_key="other")).status == 401
    path = f"/s/{key}{CHAT}"
    assert (await served.post(path, HELLO, "other", x_api_key="other")).status == 200


@with_gateway(lambda _: "yes;")
async def test_a_stop_token_of_the_client_is_no_part_of_the_text(served: Served) -> None:
    """Else the reply that the client sends back would not be the one that is held."""

    (stop,) = served.engine.texts.encode(";")
    body = HELLO | {"stop_token_ids": [stop]}
    for streamed in (False, True):
        got = await served.post(CHAT, body | {"stream": streamed})
        if streamed:
            deltas = [one["choices"][0]["delta"] for one in got.events]
            assert "".join(one.get("content", "") for one in deltas) == "yes"
        else:
            (choice,) = got.json["choices"]
            assert choice["message"]["content"] == "yes"
            assert choice["finish_reason"] == "stop"
    (sample, *_) = served.session.samples()
    assert sample.tokens[sample.mask][-1] == stop


@with_gateway()
async def test_the_shared_key_finds_a_session_by_its_name(served: Served) -> None:
    shared = served.gateway.shared_key
    served.gateway.name(served.session, "trace 1")
    named = {"x_session_id": "trace 1"}
    for key, name in ((shared, ""), (shared, "trace 2"), ("x", "trace 1"), ("", "trace 1")):
        got = await served.post(CHAT, HELLO, key, x_session_id=name)
        assert got.status == 401
        assert shared.encode() not in got.body
    assert (await served.post(CHAT, HELLO, shared, **named)).status == 200
    assert len(served.session.samples()) == 1
    # a session's own key needs no name, and any name may stand beside it
    assert (await served.post(CHAT, HELLO, x_session_id="other")).status == 200
    served.session.close()
    assert (await served.post(CHAT, HELLO, shared, **named)).status == 401


def test_no_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def play() -> str:
        async with serving(lambda _: 1 / 0) as served:
            path = f"/s/{served.session.key}{CHAT}"
            assert (await served.post(path, HELLO)).status == 500
            assert (await served.post(path, b"{")).status == 400
            return served.session.key

    assert asyncio.run(play()) not in caplog.text


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (CHAT, HELLO | {"n": 2}, ("error", "param", "n")),
        (RESPONSES, {"input": "x", "temperature": 3}, ("error", "param", "temperature")),
        (MESSAGES, HELLO | {"top_k": 2}, ("error", "type", "invalid_request_error")),
        (CHAT, b"\xff", ("error", "type", "invalid_request_error")),
        (TOKENS, {"token_ids": "x"}, ("error", "param", "token_ids")),
    ],
)
@with_gateway()
async def test_refusals_have_the_form_of_the_dialect(
    served: Served, path: str, body: Any, kind: Any
) -> None:
    got = await served.post(path, body)
    assert got.status == 400
    assert got.json[kind[0]][kind[1]] == kind[2]
    assert not served.engine.prompts


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_bytes_of_log_probs_are_the_text(path: str) -> None:
    text = "caf\u00e9 \U0001f600"

    async def play() -> None:
        async with serving(lambda _: text + END) as served:
            body: Any = {"input": "hi", "include": ["message.output_text.logprobs"]}
            body = body if path == RESPONSES else HELLO | {"logprobs": True}
            told = (await served.post(path, body)).json
            if path == RESPONSES:
                rows = told["output"][0]["content"][0]["logprobs"]
            else:
                rows = told["choices"][0]["logprobs"]["content"]
            assert b"".join(bytes(row["bytes"]) for row in rows) == (text + END).encode()

    asyncio.run(play())


def test_unknown_fields_are_named_or_refused() -> None:
    async def play() -> None:
        told = {"thread": {"type": "create"}, "a\r\nb: \u00e9": 1, "max_tokens": 9}
        asked = HELLO | told | {"chat_template_kwargs": {"unread": 1, "bos_token": "x"}}
        async with serving() as served:
            for path in (MESSAGES, MESSAGES + "/count_tokens", CHAT):
                body = asked if "count" not in path else {**asked, "max_tokens": None}
                got = await served.post(path, body)
                assert got.status == 200, got.body
                names = got.headers["x-spmd-ignored"].split(", ")
                assert names[:2] == ["thread", "a??b???"]
                assert names[2] == "chat_template_kwargs.unread"
            got = await served.post(CHAT, HELLO | {f"{at}" * 99: 1 for at in range(9999)})
            assert got.status == 200
            assert len(got.headers["x-spmd-ignored"]) < 4096
        async with serving(unknown_fields="refuse") as served:
            got = await served.post(MESSAGES, asked)
            assert got.status == 400
            assert "agent.gateway.unknown_fields" in got.json["error"]["message"]

    asyncio.run(play())


LONG = "x" * (1 << 17)
ASKED_LONG = {
    "content": {"messages": [{"role": "user", "content": LONG}]},
    "tools": HELLO | {"tools": [{"name": LONG, "function": {"name": LONG}, "input_schema": {}}]},
    "metadata": HELLO | {"metadata": {"a": LONG}},
    "messages": {"messages": [{"role": "user", "content": ""}] * 5000},
    "arguments": {
        "messages": [
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": LONG}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "b"}]},
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("path", [MESSAGES, MESSAGES + "/count_tokens", CHAT])
@pytest.mark.parametrize("what", ASKED_LONG)
@with_gateway()
async def test_long_requests_are_read_and_rendered_outside_of_the_event_loop(
    served: Served, path: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noted(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.current_thread())
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    noted(app, "read_body")
    noted(FakeTexts, "render")

    await served.post(path, ASKED_LONG[what])
    assert threading.current_thread() not in threads
    assert threads
    count = len(threads)
    await served.post(CHAT, HELLO)
    assert threading.current_thread() in threads[count:], "the control"


@with_gateway(["one" + END, "two" + END, "three" + END])
async def test_a_retry_gets_the_same_answer(served: Served) -> None:
    first = await served.post(CHAT, HELLO)
    again = await served.post(CHAT, HELLO, x_stainless_retry_count="1")
    assert first.body == again.body
    fresh = await served.post(CHAT, HELLO, x_stainless_retry_count="0")
    assert fresh.json["choices"][0]["message"]["content"] == "two"
    named = [await served.post(CHAT, HELLO, idempotency_key="k") for _ in range(2)]
    assert named[0].body == named[1].body


def test_equal_requests_at_once_are_drawn_one_by_one_and_a_retry_joins() -> None:
    async def play() -> None:
        numbers = itertools.count()
        async with serving(lambda _: f"{next(numbers)}{END}") as served:
            served.engine.gate = asyncio.Event()
            calls = [asyncio.ensure_future(served.post(CHAT, HELLO)) for _ in range(4)]
            while len(served.engine.prompts) < 4:
                await asyncio.sleep(0)
            retry = asyncio.ensure_future(served.post(CHAT, HELLO, x_stainless_retry_count="1"))
            named = [
                asyncio.ensure_future(served.post(CHAT, HELLO, idempotency_key="k"))
                for _ in range(2)
            ]
            while len(served.engine.prompts) < 5:
                await asyncio.sleep(0)
            served.engine.gate.set()
            bodies = [one.body for one in await asyncio.gather(*calls)]
            assert len(set(bodies)) == 4
            assert (await retry).body in bodies
            first, second = await asyncio.gather(*named)
            assert first.body == second.body
            assert len(served.session.samples()) == 5

    asyncio.run(play())


@with_gateway()
async def test_a_hang_up_in_a_stream_ends_the_turn(served: Served) -> None:
    served.engine.gate = asyncio.Event()
    reader, writer = await served.connect()
    data = json.dumps(HELLO | {"stream": True}).encode()
    writer.write(served.head("POST", CHAT, len(data)) + data)
    await reader.readuntil(b"data: ")
    await ends_turn(served, writer)


@with_gateway()
async def test_a_hang_up_before_a_whole_answer_ends_the_turn(served: Served) -> None:
    served.engine.gate = asyncio.Event()
    _, writer = await served.connect()
    data = json.dumps(HELLO).encode()
    writer.write(served.head("POST", CHAT, len(data)) + data)
    await served.engine.started.wait()
    await ends_turn(served, writer)


async def ends_turn(served: Served, writer: asyncio.StreamWriter) -> None:
    """Hang up, wait for the end of the call, and go on in the same session."""
    (call,) = served.session._open
    writer.transport.abort()
    await asyncio.wait([call.task])
    assert len(served.engine.cancelled) == 1
    assert [one.end for one in served.session.records] == ["lost"]
    assert not served.session.samples()
    served.engine.gate = None
    assert (await served.post(CHAT, HELLO)).status == 200
    assert len(served.session.samples()) == 1


@with_gateway()
async def test_a_session_that_closes_ends_its_streams(served: Served) -> None:
    served.engine.gate = asyncio.Event()
    whole = asyncio.ensure_future(served.post(CHAT, HELLO))
    await served.engine.started.wait()
    streamed = asyncio.ensure_future(served.post(CHAT, HELLO | {"stream": True}))
    while len(served.session._open) < 2:  # each turn of the loop lets the server go on
        await asyncio.sleep(0)
    served.session.close()
    assert (await whole).status == 401
    assert b"session has ended" in (await streamed).body


@with_gateway()
async def test_an_engine_that_fails_is_told_in_the_stream(served: Served) -> None:
    from spmd_rl.errors import SpmdError

    served.engine.problem = SpmdError("no more pages")
    got = await served.post(CHAT, HELLO)
    assert (got.status, got.headers["x-should-retry"]) == (500, "false")
    for path in (CHAT, MESSAGES):
        got = await served.post(path, HELLO | {"stream": True, "max_tokens": 9})
        assert b"no more pages" in got.body


@with_gateway()
async def test_a_turn_that_the_engine_does_not_take_is_a_bad_request(served: Served) -> None:
    served.engine.problem = RefusedTurn("sampling.stop_ids holds 999")
    got = await served.post(CHAT, HELLO | {"stop_token_ids": [999]})
    assert got.status == 400
    assert "holds 999" in got.json["error"]["message"]


@with_gateway(heartbeat_s=0.01)
async def test_a_quiet_stream_beats(served: Served) -> None:
    served.engine.gate = asyncio.Event()
    reader, writer = await served.connect()
    data = json.dumps(HELLO | {"stream": True}).encode()
    writer.write(served.head("POST", CHAT, len(data)) + data)
    await reader.readuntil(b": keep-alive")
    served.engine.gate.set()
    assert b"[DONE]" in await reader.read(-1)
    writer.close()


@with_gateway(max_waiting=1)
async def test_too_many_calls_get_429(served: Served) -> None:
    served.engine.gate = asyncio.Event()
    first = asyncio.ensure_future(served.post(CHAT, HELLO))
    await served.engine.started.wait()
    got = await served.post(CHAT, HELLO | {"max_tokens": 3})
    assert (got.status, got.headers["retry-after"]) == (429, "1")
    served.engine.gate.set()
    assert (await first).status == 200


@with_gateway(max_body_mb=1)
async def test_a_huge_body_is_refused_before_it_is_read(served: Served) -> None:
    reader, writer = await served.connect()
    writer.write(served.head("POST", CHAT, 1 << 30))
    assert (await read_answer(reader)).status == 413
    writer.close()
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    reader, writer = await served.connect()
    writer.write(served.head("POST", CHAT, 0, content_length="", transfer_encoding="chunked"))
    writer.write(chunk * 20)
    with contextlib.suppress(ConnectionError):  # the answer may be lost with the rest
        assert (await read_answer(reader)).status == 413
    writer.close()
    assert (await served.post(CHAT, HELLO, content_encoding="gzip")).status == 415
    assert (await served.post(CHAT, HELLO)).status == 200


@with_gateway(request_s=0.05)
async def test_slow_writers_are_cut_off(served: Served) -> None:
    silent, first = await served.connect()
    slow, second = await served.connect()
    second.write(b"POST / HTTP/1.1\r\nhost:")
    body, third = await served.connect()
    third.write(served.head("POST", CHAT, 10) + b"{")
    for reader in (silent, slow):
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
    assert (await read_answer(body)).status == 408
    for writer in (first, second, third):
        writer.close()


@with_gateway(max_header_kb=4)
async def test_a_head_without_end_is_cut_off(served: Served) -> None:
    reader, writer = await served.connect()
    writer.write(b"GET /health HTTP/1.1\r\nx: " + b"a" * (1 << 20))
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
    assert (await served.post(CHAT, HELLO)).status == 200


@with_gateway()
async def test_garbage_is_no_request(served: Served) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        reader, writer = await served.connect()
        writer.write(rng.bytes(200) + b"\r\n\r\n")
        assert (await read_answer(reader)).status == 400
        writer.close()
    for _ in range(50):
        got = await served.post(CHAT, rng.bytes(200))
        assert got.status == 400
    assert (await served.post(CHAT, HELLO)).status == 200


@with_gateway(max_connections=20)
async def test_connections_without_a_key_give_way_to_others(served: Served) -> None:
    """Half heads take all places, again and again; a client with a key is served all the same."""

    kept = await served.connect()
    await answered(served, kept, 0)
    strangers = []
    for number in range(50):
        strangers.append(await served.connect())
        strangers[-1][1].write(b"POST / HTTP/1.1\r\nhost:")
        if number % 10 == 9:
            assert (await served.post(CHAT, HELLO)).status == 200
    for reader, writer in strangers[:30]:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
    await answered(served, kept, 1)
    for _, writer in (kept, *strangers):
        writer.close()


@with_gateway(max_connections=20)
async def test_connections_with_a_key_keep_their_places(served: Served) -> None:
    held = [await served.connect() for _ in range(20)]
    for number, one in enumerate(held):
        await answered(served, one, number)
    for _ in range(20):
        reader, writer = await served.connect()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
    for number, one in enumerate(held):
        await answered(served, one, number + 20)
        one[1].close()
    assert len(served.session.samples()) == 40


async def answered(served: Served, connection: Any, number: int) -> None:
    """Ask on a connection that stays open, and read the answer."""
    reader, writer = connection
    data = json.dumps({"messages": [{"role": "user", "content": str(number)}]}).encode()
    writer.write(served.head("POST", CHAT, len(data), connection="keep-alive") + data)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    size = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    await reader.readexactly(int(size.split(b":")[1]))


def test_where_the_gateway_may_listen() -> None:
    with pytest.raises(ConfigError, match="may_connect_from"):
        GatewayConfig(host="0.0.0.0")
    with pytest.raises(ConfigError, match="IP address"):
        GatewayConfig(host="localhost")
    with pytest.raises(ConfigError, match="may_connect_from"):
        GatewayConfig(may_connect_from=["x"])
    config = GatewayConfig(host="0.0.0.0", may_connect_from=["10.0.0.0/8"])
    assert config.admits("10.1.2.3") and config.admits("127.0.0.1")
    assert not config.admits("11.0.0.1")

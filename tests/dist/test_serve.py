"""`spmd-rl serve` as a process: its answers, its keys, its port and its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("uvicorn", reason="the extra 'agents' is not installed")

from spmd_rl.model.hf import random_weights, save_folder
from spmd_rl.model.read import read_spec
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.serve.served_model import ServedModel
from spmd_rl.serve.served_turns import prompt_uid
from tests.dist.launched import Launched
from tests.samples import Samples, finish

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
LIKE = ROOT / "examples/environments/model"
KEY = "sk-of-the-test"
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "1 to 7"}]}


class Server(NamedTuple):
    """A process that serves, and its address without the version."""

    process: Launched
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(self, path: str, body: Any = None, key: str = KEY) -> tuple[int, bytes]:
        """Return status and body of the answer. Blocks: for at most 100 s."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=100) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny"
    save_folder(path, LIKE, random_weights(read_spec(LIKE), 3))
    return path


def start(folder: Path, *words: str) -> Launched:
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    return Launched(["serve", str(folder), *words], folder.parent, environment)


def serving(folder: Path, *words: str) -> Server:
    """Start a server. Blocks: until it answers, or has ended."""
    process = start(folder, *words)
    for line in process.stdout:
        if line.startswith("serving "):
            return Server(process, line.split(" at ")[1].split("/v1")[0])
    said = process.stderr.read()
    process.end()
    raise AssertionError(said)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    served = serving(folder, f"--key={KEY}", "--seed=11")
    yield served
    served.process.end()


def of_engine(folder: Path, prompt: list[int], seeds: Iterable[int], **sampling: Any) -> Samples:
    """Return what an engine of its own draws for a prompt and the seeds of clients."""
    tokenizer = load_tokenizer(folder)
    engine = ServedModel.find(folder).engine(
        NativeEngineConfig(), torch.device("cpu"), lambda ids: tokenizer.decode(list(ids))
    )
    tokens = np.array(prompt, np.int32)
    config = SamplingConfig(**{"stop_ids": (tokenizer.eos_token_id,)} | sampling)
    uid = prompt_uid(tokens)
    return finish(engine, [Request(uid, seed, tokens, config, seed=11) for seed in seeds])


@pytest.mark.parametrize("own", [{}, {"temperature": 0.5, "top_k": 9}, {"temperature": 0}])
def test_answers_are_the_samples_of_an_engine(
    server: Server, folder: Path, own: dict[str, Any]
) -> None:
    """Thirty requests at once, each compared with its own sample, bit for bit."""
    asked = {"return_token_ids": True, "logprobs": True, "max_tokens": 20, **own}
    bodies = [HELLO | asked | {"seed": seed} for seed in range(30)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: server.ask(CHAT, body), bodies))
    assert {status for status, _ in answers} == {200}, answers[0]
    told = [json.loads(body) for _, body in answers]
    drawn = of_engine(folder, told[0]["prompt_token_ids"], range(30), max_tokens=20, **own)
    replies = set()
    (uid,) = {uid for uid, _ in drawn}
    for seed, answer in enumerate(told):
        (choice,), sample = answer["choices"], drawn[uid, seed]
        assert choice["token_ids"] == sample.tokens.tolist()
        logprobs = np.float32([one["logprob"] for one in choice["logprobs"]["content"]])
        assert logprobs.tobytes() == sample.logprobs.tobytes()
        replies.add(tuple(choice["token_ids"]))
    assert len(replies) == (1 if own.get("temperature") == 0 else len(bodies))


def test_every_dialect_gives_the_same_reply(server: Server) -> None:
    own = {"temperature": 0}
    status, body = server.ask(CHAT, HELLO | own | {"max_tokens": 6, "return_token_ids": True})
    assert status == 200, body
    chat = json.loads(body)
    (choice,) = chat["choices"]
    text = choice["message"]["content"]
    messages = json.loads(server.ask("/v1/messages", HELLO | own | {"max_tokens": 6})[1])
    assert messages["content"][0]["text"] == text
    asked = {"input": "1 to 7", "max_output_tokens": 6} | own
    responses = json.loads(server.ask("/v1/responses", asked)[1])
    assert responses["output"][0]["content"][0]["text"] == text
    asked = {"token_ids": chat["prompt_token_ids"], "sampling_params": {"max_tokens": 6} | own}
    tokens = json.loads(server.ask("/inference/v1/generate", asked)[1])
    assert tokens["choices"][0]["token_ids"] == choice["token_ids"]
    streamed = server.ask(CHAT, HELLO | own | {"max_tokens": 6, "stream": True})[1].decode()
    lines = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(one.get("content", "") for one in deltas) == text


def test_without_a_limit_a_reply_may_fill_the_context(server: Server) -> None:
    _, body = server.ask(CHAT, HELLO | {"seed": 1, "top_k": 1, "temperature": 1})
    answer = json.loads(body)
    assert answer["usage"]["total_tokens"] == 128
    assert answer["choices"][0]["finish_reason"] == "length"


def test_models_and_keys(server: Server) -> None:
    status, body = server.ask("/v1/models")
    (model,) = json.loads(body)["data"]
    assert (status, model["id"], model["max_model_len"]) == (200, "tiny", 128)
    for key in ("", "wrong", KEY + "x"):
        assert server.ask("/v1/models", key=key)[0] == 401
        assert server.ask(CHAT, HELLO, key=key)[0] == 401
    assert server.ask(f"/s/{KEY}/v1/models", key="")[0] == 200


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"n": 129}, "n: expected at most 128"),
        ({"n": 2, "stream": True}, "several replies"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: expected 0 to 20"),
        ({"presence_penalty": 1}, "this server draws from the model as it is"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"stop_token_ids": [3, 104]}, "the ids of this model end at 103"),
        ({"messages": [{"role": "user", "content": "9" * 200}]}, "too long"),
    ],
)
def test_what_cannot_be_is_refused(server: Server, body: dict[str, Any], told: str) -> None:
    status, answer = server.ask(CHAT, HELLO | {"max_tokens": 2} | body)
    assert status == 400
    assert told in json.loads(answer)["error"]["message"]


COMPLETIONS = "/v1/completions"


def completed(server: Server, prompt: Any, **more: Any) -> Any:
    status, body = server.ask(COMPLETIONS, {"prompt": prompt, "temperature": 0, **more})
    assert status == 200, body
    return json.loads(body)


def test_several_replies_are_those_of_their_own_seeds(server: Server, folder: Path) -> None:
    asked = HELLO | {"n": 3, "seed": 4, "max_tokens": 9, "return_token_ids": True}
    answer = json.loads(server.ask(CHAT, asked)[1])
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2]
    ids = [one["token_ids"] for one in answer["choices"]]
    assert len({tuple(one) for one in ids}) == 3
    again = json.loads(server.ask(CHAT, asked)[1])
    assert [one["token_ids"] for one in again["choices"]] == ids
    (first,) = of_engine(folder, answer["prompt_token_ids"], [4], max_tokens=9).values()
    assert ids[0] == first.tokens.tolist()
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(answer["prompt_token_ids"])
    assert usage["completion_tokens"] == sum(map(len, ids))


def test_the_prefix_cache_is_told(server: Server) -> None:
    prompt = [5 + place % 50 for place in range(100)]
    told = [completed(server, prompt, max_tokens=1)["usage"] for _ in range(2)]
    cached = [one["prompt_tokens_details"]["cached_tokens"] for one in told]
    assert cached[0] == 0 and 0 < cached[1] < 100
    body = {"messages": [{"role": "user", "content": "7" * 90}], "max_tokens": 1}
    for _ in range(2):
        usage = json.loads(server.ask("/v1/messages", body)[1])["usage"]
    assert usage["cache_read_input_tokens"] > 0
    page = server.ask("/metrics")[1].decode()
    (line,) = [one for one in page.splitlines() if one.startswith("spmd_rl_cached_prompt")]
    assert int(line.split()[1]) >= cached[1] + usage["cache_read_input_tokens"]


def test_log_probs_of_a_text_are_those_that_the_engine_draws(server: Server) -> None:
    """What lm-eval asks of `local-completions`, and how it reads the answer."""
    prompt = [9, 10, 11, 12, 13, 14]
    drawn = completed(server, prompt, max_tokens=6, logprobs=1, return_token_ids=True)
    (choice,) = drawn["choices"]
    whole = [*prompt, *choice["token_ids"]]
    for max_tokens in (0, 1):
        asked = {"max_tokens": max_tokens, "logprobs": 1, "echo": True}
        (scored,) = completed(server, whole, **asked)["choices"]
        table = scored["logprobs"]
        assert len(table["tokens"]) == len(whole) + max_tokens
        assert table["token_logprobs"][0] is table["top_logprobs"][0] is None
        told = np.float32(table["token_logprobs"][len(prompt) : len(whole)])
        assert told.tobytes() == np.float32(choice["logprobs"]["token_logprobs"]).tobytes()
        for name, value, top in zip(
            *(
                table[key][len(prompt) : len(whole)]
                for key in ("tokens", "token_logprobs", "top_logprobs")
            ),
            strict=True,
        ):
            assert max(top.values()) == value == top[name], "greedy tokens are the likeliest"
    asked = {"max_tokens": 1, "logprobs": 0, "echo": True, "return_tokens_as_token_ids": True}
    (named,) = completed(server, [*prompt, 15], **asked)["choices"]
    assert named["logprobs"]["tokens"][:7] == [f"token_id:{one}" for one in [*prompt, 15]]


def test_the_likeliest_tokens_stand_beside_the_drawn_one(server: Server) -> None:
    asked = {"logprobs": True, "top_logprobs": 3, "max_tokens": 8, "temperature": 0.7, "seed": 1}
    (choice,) = json.loads(server.ask(CHAT, HELLO | asked)[1])["choices"]
    for row in choice["logprobs"]["content"]:
        tops = row["top_logprobs"]
        values = [one["logprob"] for one in tops]
        assert len(tops) == 3 and values == sorted(values, reverse=True)
        same = [one["logprob"] for one in tops if one["bytes"] == row["bytes"]]
        assert same == [row["logprob"]] * len(same)
        assert row["logprob"] <= values[0]


def test_prompts_of_a_completion(server: Server) -> None:
    """Texts and token ids, one or several; each reply is that of its prompt alone."""
    texts = ["1 to 7", "2 to 9"]
    alone = [completed(server, text, max_tokens=5)["choices"][0]["text"] for text in texts]
    told = completed(server, texts, max_tokens=5)
    assert [one["text"] for one in told["choices"]] == alone
    assert [one["index"] for one in told["choices"]] == [0, 1]
    (echoed,) = completed(server, texts[0], max_tokens=5, echo=True)["choices"]
    assert echoed["text"] == texts[0] + alone[0]
    body = {"prompt": texts[1], "temperature": 0, "max_tokens": 5, "stream": True}
    streamed = server.ask(COMPLETIONS, body)[1].decode()
    lines = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == alone[1]
    assert completed(server, texts, n=2, max_tokens=2)["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt: expected token ids"),
        ({"prompt": [104]}, "vocabulary"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logprobs": 21}, "logprobs: expected 0 to 20"),
        ({"prompt": [7] * 128}, "too long"),
    ],
)
def test_completions_that_cannot_be(server: Server, body: dict[str, Any], told: str) -> None:
    status, answer = server.ask(COMPLETIONS, body)
    assert status == 400
    assert told in json.loads(answer)["error"]["message"]


def test_ids_outside_the_vocabulary_are_refused(server: Server) -> None:
    status, answer = server.ask("/inference/v1/generate", {"token_ids": [104]})
    assert status == 400
    assert "vocabulary" in json.loads(answer)["error"]["message"]


def test_a_port_in_use_is_refused(server: Server, folder: Path) -> None:
    process = start(folder, f"--port={server.port}")
    try:
        _, err = process.communicate(timeout=1000)
    finally:
        process.end()
    assert process.returncode == 2
    expected = f"the gateway cannot listen at 127.0.0.1, port {server.port}: Address already in use"
    assert err.strip() == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(folder: Path, number: int) -> None:
    served = serving(folder)
    try:
        assert served.ask("/v1/models", key="any")[0] == 200, "without a key anyone here may ask"
        with socket.create_connection(("127.0.0.1", served.port)) as open_one:
            asyncio.run(_begin_a_stream(open_one))
            served.process.send_signal(number)
            out, err = served.process.communicate(timeout=1000)
        assert (served.process.returncode, out, err) == (0, "", "")
        again = serving(folder, f"--port={served.port}")
        again.process.end()
    finally:
        served.process.end()


async def _begin_a_stream(connection: socket.socket) -> None:
    """Ask for a stream and read its first event."""
    body = json.dumps(HELLO | {"stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection(sock=connection.dup())
    writer.write(head + body)
    await reader.readuntil(b"data: ")
    writer.close()

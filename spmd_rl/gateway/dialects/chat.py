"""OpenAI chat completions: requests, answers and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from spmd_rl.data.logs import openai_chat
from spmd_rl.data.logs.form import Json, other_tools
from spmd_rl.data.render.messages import Message
from spmd_rl.errors import SpmdError
from spmd_rl.gateway.dialects.fields import RequestFields, extras_of, read_messages
from spmd_rl.gateway.dialects.request import (
    PolicyReply,
    Refused,
    ReplyRequest,
    ReplyStart,
    SamplingRules,
)
from spmd_rl.gateway.replies import ReplyPiece
from spmd_rl.gateway.sse import DONE, event
from spmd_rl.types.samples import MODEL

# what is read of a request, by its place
_KNOWN = {
    "messages": {
        "role", "content", "reasoning_content", "reasoning", "reasoning_details", "thinking",
        "thinking_blocks", "tool_calls", "tool_call_id", "tool_call_ids", "name",
    },
    "messages[].content": {"type", "text", "thinking", "signature"},
    "messages[].tool_calls": {"id", "type", "function", "index"},
}  # fmt: skip


def read(body: Json, rules: SamplingRules) -> ReplyRequest:
    """Return what a body asks for. Raises: Refused."""
    fields = RequestFields(body, rules)
    given = {"messages": fields.take("messages", list, []), "tools": fields.take("tools", list, [])}
    if not given["messages"]:
        raise Refused("messages", "expected a list with at least one message")
    _refuse_silent(given["messages"])
    row = read_messages(openai_chat.read, given)
    fields.look_into("messages", given["messages"], _KNOWN)
    sampling, num_choices, num_top = fields.sampling(), fields.choices(), fields.num_top()
    fields.neutral()
    limits = fields.number("max_completion_tokens"), fields.number("max_tokens")
    asked = fields.request(
        messages=row["messages"],
        extras=extras_of(row, fields),
        max_tokens=limits[0] or limits[1],
        sampling=sampling,
        logprobs=fields.take("logprobs", bool, False),
        num_top=num_top,
        ignored=other_tools(given["tools"]),
        **fields.stops_and_usage(),
    )
    return asked.of_each([asked], num_choices)


def _refuse_silent(messages: list[Any]) -> None:
    """Raise Refused for a message without content, which only the policy's replies may be."""
    for number, one in enumerate(messages):
        is_told = isinstance(one, dict) and one.get("role") not in (MODEL, None)
        if is_told and one.get("content") is None:
            raise Refused(f"messages[{number}].content", "expected a text, or a list of parts")


def usage(drawn: PolicyReply) -> Json:
    """Return the numbers of tokens."""
    prompt, reply = drawn.begun.num_prompt, len(drawn.data)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": reply,
        "total_tokens": prompt + reply,
        "prompt_tokens_details": {"cached_tokens": drawn.begun.num_cached},
    }


def wire_call(made: Message) -> Message:
    """Return a tool call whose arguments are JSON text."""
    function = made["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**made, "function": {"name": function["name"], "arguments": arguments}}


def logprob_rows(drawn: PolicyReply) -> list[Json]:
    """Return an entry for each token, with its text, bytes and log-prob, and the likeliest."""
    tops = drawn.tops() or [[] for _ in drawn.logprobs]
    columns = drawn.data.tokens.tolist(), drawn.logprobs, tops
    return [
        _row(drawn, token, value) | {"top_logprobs": [_row(drawn, *one) for one in top]}
        for token, value, top in zip(*columns, strict=True)
    ]


def _row(drawn: PolicyReply, token: int, value: float) -> Json:
    text, data = drawn.texts.decode([token]), drawn.texts.token_bytes(token)
    return {"token": text, "logprob": value, "bytes": list(data)}


def joined(asked: ReplyRequest, answers: list[Json]) -> Json:
    """Return one answer with all replies of a request, of chats or completions."""
    whole = answers[0]
    for one, other in zip(asked.more, answers[1:], strict=True):
        whole["choices"] += other["choices"]
        total, more = whole["usage"], other["usage"]
        total["completion_tokens"] += more["completion_tokens"]
        if not one.shares_prompt:
            total["prompt_tokens"] += more["prompt_tokens"]
            cached = more["prompt_tokens_details"]["cached_tokens"]
            total["prompt_tokens_details"]["cached_tokens"] += cached
        total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    return whole


def answer(asked: ReplyRequest, drawn: PolicyReply) -> Json:
    """Return the whole answer."""
    reply = drawn.message
    message: dict[str, Any] = {"role": MODEL, "content": reply["content"], "refusal": None}
    if calls := reply.get("tool_calls"):
        message["content"] = reply["content"] or None
        message["tool_calls"] = list(map(wire_call, calls))
    if thought := reply.get("reasoning_content"):
        message["reasoning_content"] = thought
    choice: Json = {"index": asked.choice, "message": message, "finish_reason": drawn.finish}
    choice |= _asked_for(asked, drawn)
    body = head(drawn.begun, "chatcmpl", "chat.completion") | {
        "choices": [choice],
        "usage": usage(drawn),
    }
    return body | _prompt_ids(asked, drawn)


def _asked_for(asked: ReplyRequest, drawn: PolicyReply) -> Json:
    found: Json = {"logprobs": {"content": logprob_rows(drawn)} if asked.logprobs else None}
    if asked.return_token_ids:
        found |= {"token_ids": drawn.data.tokens.tolist(), "spmd": drawn.token_facts()}
    return found


def _prompt_ids(asked: ReplyRequest, drawn: PolicyReply) -> Json:
    return {"prompt_token_ids": drawn.prompt_ids.tolist()} if asked.return_token_ids else {}


def head(begun: ReplyStart, prefix: str, kind: str) -> Json:
    """Return the fields with which an answer, or a chunk of a stream, begins."""
    name = {"id": f"{prefix}-{begun.id}", "object": kind}
    return name | {"created": begun.created_s, "model": begun.model}


class DataStream:
    """The last events of a stream of OpenAI's chunks, each of which begins with `head`."""

    def __init__(self, asked: ReplyRequest, head: Json) -> None:
        self._asked, self._head = asked, head

    def usage_and_done(self, drawn: PolicyReply) -> Iterator[bytes]:
        if self._asked.stream_usage:
            yield event({**self._head, "choices": [], "usage": usage(drawn)})
        yield DONE

    def failed(self, error: SpmdError) -> Iterator[bytes]:
        yield event({"error": {"message": str(error), "type": "server_error"}})
        yield DONE


class ChatStream(DataStream):
    """Events of a stream."""

    def __init__(self, asked: ReplyRequest, begun: ReplyStart) -> None:
        super().__init__(asked, head(begun, "chatcmpl", "chat.completion.chunk"))
        self._num_calls = 0

    def start(self) -> Iterator[bytes]:
        yield self._chunk({"role": MODEL, "content": ""})

    def piece(self, piece: ReplyPiece) -> Iterator[bytes]:
        if piece.kind != "tool_call":
            yield self._chunk({piece.kind: piece.text})
            return
        made = {"index": self._num_calls, **wire_call(piece.call)}
        self._num_calls += 1
        yield self._chunk({"tool_calls": [made]})

    def end(self, drawn: PolicyReply) -> Iterator[bytes]:
        last = _asked_for(self._asked, drawn) | {"finish_reason": drawn.finish}
        yield self._chunk({}, **last, **_prompt_ids(self._asked, drawn))
        yield from self.usage_and_done(drawn)

    def _chunk(self, delta: Json, **more: Any) -> bytes:
        top = {name: more.pop(name) for name in ("prompt_token_ids",) if name in more}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | more
        return event({**self._head, **top, "choices": [choice]})

"""OpenAI Responses: requests, answers and streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spmd_rl.data.logs import openai_responses
from spmd_rl.data.logs.form import Json, other_tools
from spmd_rl.errors import SpmdError
from spmd_rl.gateway.dialects.chat import logprob_rows, wire_call
from spmd_rl.gateway.dialects.fields import RequestFields, extras_of, read_messages
from spmd_rl.gateway.dialects.request import (
    PolicyReply,
    Refused,
    ReplyRequest,
    ReplyStart,
    SamplingRules,
)
from spmd_rl.gateway.replies import ReplyPiece
from spmd_rl.gateway.sse import event
from spmd_rl.types.samples import MODEL

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = [_LOGPROBS, "reasoning.encrypted_content"]  # a client may ask for what has no hash
_ITEM = {
    "type", "role", "content", "summary", "id", "status", "call_id", "name", "arguments", "output",
}  # fmt: skip
# what is read of a request, by its place
_KNOWN = {
    "input": _ITEM,
    "input[].content": {"type", "text"},
    "input[].output": {"type", "text"},
    "tools": {"type", "name", "description", "parameters"},
}


def read(body: Json, rules: SamplingRules) -> ReplyRequest:
    """Return what a body asks for. Raises: Refused."""
    fields = RequestFields(body, rules)
    given = {
        "input": fields.take("input", (str, list), []),
        "instructions": fields.take("instructions", str),
        "tools": fields.take("tools", list, []),
    }
    if not given["input"]:
        raise Refused("input", "expected a text or a list with at least one item")
    row = read_messages(openai_responses.read, given)
    fields.look_into("input", given["input"], _KNOWN)
    fields.look_into("tools", given["tools"], _KNOWN)
    sampling, num_top = fields.sampling(), fields.num_top()
    included = _neutral(fields, rules)
    return fields.request(
        messages=row["messages"],
        extras=extras_of(row, fields),
        max_tokens=fields.number("max_output_tokens"),
        sampling=sampling,
        logprobs=_LOGPROBS in included,
        num_top=num_top,
        ignored=other_tools(given["tools"]),
    )


def _neutral(fields: RequestFields, rules: SamplingRules) -> list[Any]:
    """Take the fields that say nothing about the reply, and return what the answer includes.

    Raises: Refused.
    """
    fields.only("previous_response_id", because="send the whole conversation as input")
    fields.only("conversation", because="send the whole conversation as input")
    fields.only("background", False, because="this gateway does not do it")
    fields.only("truncation", "disabled", "auto", because="this gateway does not do it")
    if (form := fields.take("text", dict, {}).get("format")) not in (None, {"type": "text"}):
        raise Refused("text.format", f"expected text, got {form!r:.60}: {rules.reason}")
    included: list[Any] = fields.take("include", list, [])
    if unknown := [one for one in included if one not in _INCLUDED]:
        raise Refused("include", f"this gateway does not know {unknown[0]!r:.60}")
    fields.ignore("reasoning", "max_tool_calls", "stream_options", "client_metadata")
    fields.neutral()
    return included


def answer(asked: ReplyRequest, drawn: PolicyReply) -> Json:
    """Return the whole answer."""
    return _response(asked, drawn.begun, drawn) | {"output": list(_items(asked, drawn))}


def _response(asked: ReplyRequest, begun: ReplyStart, drawn: PolicyReply | None) -> Json:
    """Return the fields of a response without its output; `drawn` is None before the end."""
    status = "in_progress"
    if drawn is not None:
        status = "incomplete" if drawn.finish == "length" else "completed"
    found = {
        "id": f"resp_{begun.id}",
        "object": "response",
        "created_at": begun.created_s,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": begun.model,
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [{"type": "function", **tool["function"]} for tool in asked.extras.tools],
        "top_p": None,
        "usage": _usage(drawn) if drawn else None,
    }
    if drawn is not None and asked.return_token_ids:
        found["spmd"] = drawn.facts()
    return found


def _usage(drawn: PolicyReply) -> Json:
    prompt, reply = drawn.begun.num_prompt, len(drawn.data)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": drawn.begun.num_cached},
        "output_tokens": reply,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + reply,
    }


def _items(asked: ReplyRequest, drawn: PolicyReply) -> Iterator[Json]:
    """Yield the items of a reply: its thought, its text, and its calls."""
    reply, name = drawn.message, drawn.begun.id
    if thought := reply.get("reasoning_content"):
        yield _thought_item(name, thought)
    if reply["content"] or "tool_calls" not in reply:
        rows = logprob_rows(drawn) if asked.logprobs else []
        yield _text_item(name, reply["content"], rows)
    for made in reply.get("tool_calls", ()):
        yield _call_item(wire_call(made))


def _thought_item(name: str, text: str) -> Json:
    summary = [{"type": "summary_text", "text": text}]
    return {"id": f"rs_{name}", "type": "reasoning", "summary": summary}


def _text_item(name: str, text: str, rows: list[Json]) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": rows}
    head = {"id": f"msg_{name}", "type": "message", "role": MODEL, "status": "completed"}
    return {**head, "content": [part]}


def _call_item(made: Json) -> Json:
    return {
        "id": made["id"].replace("call_", "fc_", 1),
        "type": "function_call",
        "call_id": made["id"],
        **made["function"],
        "status": "completed",
    }


class ResponseStream:
    """Events of a stream. Calls come last, so that the items are those of the whole answer."""

    def __init__(self, asked: ReplyRequest, begun: ReplyStart) -> None:
        self._asked, self._begun = asked, begun
        self._num_events = 0
        self._num_items = 0  # that are done
        self._open: tuple[str, str] | None = None  # kind and text of the item that is open
        self._calls: list[Json] = []

    def start(self) -> Iterator[bytes]:
        for kind in ("created", "in_progress"):
            response = _response(self._asked, self._begun, None)
            yield self._event(f"response.{kind}", response=response)

    def piece(self, piece: ReplyPiece) -> Iterator[bytes]:
        if piece.kind == "tool_call":
            self._calls.append(piece.call)
            return
        if self._open is None or self._open[0] != piece.kind:
            yield from self._close()
            yield from self._begin(piece.kind)
        assert self._open is not None  # it has just begun
        self._open = piece.kind, self._open[1] + piece.text
        kind = "output_text" if piece.kind == "content" else "reasoning_summary_text"
        more: Json = {"logprobs": []} if piece.kind == "content" else {}
        yield self._event(f"response.{kind}.delta", **self._part(), delta=piece.text, **more)

    def end(self, drawn: PolicyReply) -> Iterator[bytes]:
        reply = drawn.message
        yield from self._close()
        if not reply["content"] and "tool_calls" not in reply:
            yield from self._begin("content")  # a reply without a word
            yield from self._close()
        for made in self._calls:
            yield from self._call(_call_item(wire_call(made)))
        name = "response.incomplete" if drawn.finish == "length" else "response.completed"
        yield self._event(name, response=answer(self._asked, drawn))

    def failed(self, error: SpmdError) -> Iterator[bytes]:
        told = {"code": "server_error", "message": str(error)}
        response = _response(self._asked, self._begun, None) | {"status": "failed", "error": told}
        yield self._event("response.failed", response=response)

    def _begin(self, kind: str) -> Iterator[bytes]:
        self._open = kind, ""
        item = self._item() | {"status": "in_progress"}
        empty = item | ({"content": []} if kind == "content" else {"summary": []})
        index = {"output_index": self._num_items}
        yield self._event("response.output_item.added", **index, item=empty)
        name, part = self._part_event()
        yield self._event(f"{name}.added", **self._part(), part=part)

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        kind, text = self._open
        told = "output_text" if kind == "content" else "reasoning_summary_text"
        more: Json = {"logprobs": []} if kind == "content" else {}
        yield self._event(f"response.{told}.done", **self._part(), text=text, **more)
        name, part = self._part_event()
        yield self._event(f"{name}.done", **self._part(), part=part)
        index = {"output_index": self._num_items}
        yield self._event("response.output_item.done", **index, item=self._item())
        self._num_items, self._open = self._num_items + 1, None

    def _item(self) -> Json:
        assert self._open is not None  # asked only while an item is open
        kind, text = self._open
        name = self._begun.id
        return _text_item(name, text, []) if kind == "content" else _thought_item(name, text)

    def _part_event(self) -> tuple[str, Json]:
        """Return the name of the events of a part, and the part so far."""
        item = self._item()
        if item["type"] == "message":
            return "response.content_part", item["content"][0]
        return "response.reasoning_summary_part", item["summary"][0]

    def _part(self) -> Json:
        item = self._item()
        index = "content_index" if item["type"] == "message" else "summary_index"
        return {"item_id": item["id"], "output_index": self._num_items, index: 0}

    def _call(self, item: Json) -> Iterator[bytes]:
        index = {"output_index": self._num_items}
        begun = item | {"arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", **index, item=begun)
        where = {"item_id": item["id"], **index}
        kind, arguments = "response.function_call_arguments", item["arguments"]
        yield self._event(f"{kind}.delta", **where, delta=arguments)
        yield self._event(f"{kind}.done", **where, name=item["name"], arguments=arguments)
        yield self._event("response.output_item.done", **index, item=item)
        self._num_items += 1

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

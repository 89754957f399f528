"""Anthropic messages: requests, answers and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from spmd_rl.data.logs import anthropic
from spmd_rl.data.logs.form import Json
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
from spmd_rl.gateway.sse import event
from spmd_rl.types.samples import MODEL

_BILLING = "x-anthropic-billing-header"  # what a line begins with
_BLOCK = {
    "type", "text", "thinking", "signature", "id", "name", "input", "tool_use_id", "content",
}  # fmt: skip
# what is read of a request, by its place
_KNOWN = {
    "system": {"type", "text"},
    "messages": {"role", "content"},
    "messages[].content": _BLOCK,
    "messages[].content[].content": {"type", "text"},
    "tools": {"type", "name", "description", "input_schema"},
}


def read(body: Json, rules: SamplingRules) -> ReplyRequest:
    """Return what a body asks for. Raises: Refused."""
    fields = RequestFields(body, rules)
    row = _conversation(fields)
    sampling = fields.sampling()
    _neutral(fields)
    return fields.request(
        messages=row["messages"],
        extras=extras_of(row, fields),
        max_tokens=fields.number("max_tokens"),
        stops=fields.texts("stop_sequences"),
        sampling=sampling,
    )


def read_counted(body: Json, rules: SamplingRules) -> ReplyRequest:
    """Return what a body asks to count the tokens of. Raises: Refused."""
    fields = RequestFields(body, rules)
    row = _conversation(fields)
    _neutral(fields)
    model, extras = fields.take("model", str, ""), extras_of(row, fields)
    ignored, unknown = fields.ignored, fields.unknown
    told = row["messages"]
    return ReplyRequest(model=model, messages=told, extras=extras, ignored=ignored, unknown=unknown)


def _conversation(fields: RequestFields) -> Json:
    given = {
        "messages": fields.take("messages", list, []),
        "system": fields.take("system", (str, list)),
        "tools": fields.take("tools", list, []),
    }
    if not given["messages"]:
        raise Refused("messages", "expected a list with at least one message")
    given["system"] = _without_billing(fields, given["system"])
    row = read_messages(anthropic.read, given)
    for name, items in given.items():
        fields.look_into(name, items, _KNOWN)
    return row


def _without_billing(fields: RequestFields, system: Any) -> Any:
    """Return the system prompt without a line of Claude Code that is meant for its maker's server.

    It may change from call to call, so that no call goes on from what was drawn before it.
    """
    kept = []
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or ()
    for block in blocks:
        text = block.get("text") if isinstance(block, dict) else None
        if isinstance(text, str) and text.startswith(_BILLING):
            fields.note(f"system.{_BILLING}")
            rest = text.partition("\n")[2].lstrip("\n")
            kept += [{**block, "text": rest}] if rest else []
        else:
            kept.append(block)
    return kept or None


def _neutral(fields: RequestFields) -> None:
    """Take the fields that say nothing about the reply. Raises: Refused."""
    because = "this gateway does not do it"
    fields.only("mcp_servers", [], because=because)
    fields.only("container", because=because)
    fields.ignore("thinking", "context_management", "output_config", "inference_geo")
    fields.ignore("cache_control", "speed")
    fields.neutral()


def answer(asked: ReplyRequest, drawn: PolicyReply) -> Json:
    """Return the whole answer."""
    reply, blocks = drawn.message, []
    if thought := reply.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if reply["content"]:
        blocks.append({"type": "text", "text": reply["content"], "citations": None})
    for made in reply.get("tool_calls", ()):
        blocks.append(_call_block(made))
    found = _message(drawn.begun) | _ending(drawn)
    found |= {"content": blocks, "usage": _usage(drawn.begun, len(drawn.data))}
    return found | ({"spmd": drawn.facts()} if asked.return_token_ids else {})


def _call_block(made: Json) -> Json:
    function = made["function"]
    used = {"id": made["id"], "name": function["name"], "input": function["arguments"]}
    return {"type": "tool_use", **used}


def _message(begun: ReplyStart) -> Json:
    head = {"id": f"msg_{begun.id}", "type": "message", "role": MODEL, "model": begun.model}
    return head | {"content": [], "stop_reason": None, "stop_sequence": None}


def _ending(drawn: PolicyReply) -> Json:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    if drawn.stop and drawn.finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": drawn.stop}
    return {"stop_reason": reasons[drawn.finish], "stop_sequence": None}


def _usage(begun: ReplyStart, num_drawn: int) -> Json:
    return {
        "input_tokens": begun.num_prompt - begun.num_cached,
        "cache_read_input_tokens": begun.num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_drawn,
    }


class MessageStream:
    """Events of a stream. Calls come last, so that the blocks are those of the whole answer."""

    def __init__(self, asked: ReplyRequest, begun: ReplyStart) -> None:
        self._asked, self._begun = asked, begun
        self._num_blocks = 0  # that are done
        self._open: str | None = None
        self._calls: list[Json] = []

    def start(self) -> Iterator[bytes]:
        message = _message(self._begun) | {"usage": _usage(self._begun, 0)}
        yield _event("message_start", message=message)

    def piece(self, piece: ReplyPiece) -> Iterator[bytes]:
        if piece.kind == "tool_call":
            self._calls.append(piece.call)
            return
        is_text = piece.kind == "content"
        if self._open != piece.kind:
            yield from self._close()
            empty: Json = {"type": "text", "text": "", "citations": None}
            if not is_text:
                empty = {"type": "thinking", "thinking": "", "signature": ""}
            yield self._block("start", content_block=empty)
            self._open = piece.kind
        delta = {"type": "text_delta", "text": piece.text}
        if not is_text:
            delta = {"type": "thinking_delta", "thinking": piece.text}
        yield self._block("delta", delta=delta)

    def end(self, drawn: PolicyReply) -> Iterator[bytes]:
        yield from self._close()
        for made in self._calls:
            block = _call_block(made)
            text = json.dumps(block["input"], ensure_ascii=False)
            yield self._block("start", content_block=block | {"input": {}})
            yield self._block("delta", delta={"type": "input_json_delta", "partial_json": text})
            yield self._block("stop")
            self._num_blocks += 1
        more = {"spmd": drawn.facts()} if self._asked.return_token_ids else {}
        usage = _usage(drawn.begun, len(drawn.data))
        yield _event("message_delta", delta=_ending(drawn), usage=usage, **more)
        yield _event("message_stop")

    def failed(self, error: SpmdError) -> Iterator[bytes]:
        yield _event("error", error={"type": "api_error", "message": str(error)})

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield self._block("stop")
            self._num_blocks, self._open = self._num_blocks + 1, None

    def _block(self, kind: str, **fields: Any) -> bytes:
        return _event(f"content_block_{kind}", index=self._num_blocks, **fields)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)

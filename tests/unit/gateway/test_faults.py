"""Faults of replies: calls that a client cannot answer."""

from __future__ import annotations

from typing import Any

import pytest

from spmd_rl.gateway.dialects.request import Refused
from spmd_rl.gateway.faults import fault_of
from spmd_rl.gateway.follow_template import TemplateExtras
from tests.unit.gateway.fakes import in_event_loop
from tests.unit.gateway.test_session import END, TOOLS, draw, make, said, user

ADD = {"properties": {"a": {"type": "integer"}, "b": {"type": "number"}}, "required": ["a"]}
FLAG = {"properties": {"on": {"type": "boolean"}}, "additionalProperties": True}


def tools(**schemas: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in schemas.items()
    ]


def says(name: str = "", content: str = "", **arguments: Any) -> dict[str, Any]:
    calls = [{"function": {"name": name, "arguments": arguments}}] if name else []
    return {"content": content, "tool_calls": calls}


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        (says("add", a=1), ""),
        (says("add", a=1, b=2.5), ""),
        (says("add", a=1.0), ""),
        (says("add", b=1), "call"),
        (says("add", a="1"), "call"),
        (says("add", a=True), "call"),
        (says("add", a=1, c=2), "call"),
        (says("flag", on=True, c=2), ""),
        (says("flag", on=1), "call"),
        (says("other", a=1), "call"),
        (says("free", a=[1]), ""),
        (says(content="so: 5"), ""),
        (says(content="<call>{"), "call"),
        ({"content": "no calls"}, ""),
    ],
)
def test_a_call_fits_a_tool_of_the_request(reply: dict[str, Any], fault: str) -> None:
    offered = tools(add=ADD, flag=FLAG, free=None)
    assert fault_of(reply, offered, "<call>") == fault
    assert fault_of(reply, [], "<call>") == ""


@pytest.mark.parametrize("schema", [[], 7, {"properties": [1], "required": True}, {"type": []}])
def test_a_schema_that_is_none_allows_all(schema: Any) -> None:
    assert fault_of(says("add", a=1), tools(add=schema), "") == ""
    odd = {"properties": {"a": True, "b": {"type": ["null"]}}}
    assert fault_of(says("add", a=1, b=2), tools(add=odd), "") == ""


@pytest.mark.parametrize(
    ("drawn", "fault"),
    [
        ('<call>{"name": "g", "arguments": {}}</call>', "call"),
        ("<call>no</call>", "call"),
        ('<call>{"name": "f", "arguments": {}}</call>', None),
    ],
)
@in_event_loop
async def test_a_branch_that_ends_with_a_wrong_call_says_so(drawn: str, fault: str | None) -> None:
    session, _ = make([drawn + END, "x" + END])
    extras = TemplateExtras(TOOLS, {})
    first = await draw(session, [user("a")], extras=extras)
    assert [one.metadata.get("fault") for one in session.samples()] == [fault]
    await draw(session, [user("a"), said(first), user("no such tool")], extras=extras)
    assert [one.metadata.get("fault") for one in session.samples()] == [None], "it went on"


@in_event_loop
async def test_a_branch_after_which_the_context_is_full_says_so() -> None:
    session, _ = make(lambda prompt: "x" + END)
    first = await draw(session, [user("a")])
    await draw(session, [user("b")])
    with pytest.raises(Refused):
        await draw(session, [user("a"), said(first), user("b" * (1 << 17))])
    assert [one.metadata.get("fault") for one in session.samples()] == ["context", None]

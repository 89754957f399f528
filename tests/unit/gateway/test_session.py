"""A session learns every drawn turn once, and holds the tokens that were drawn."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.data.logs.form import message
from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.gateway.dialects.request import PolicyReply, Refused, ReplyRequest, SamplingRules
from spmd_rl.gateway.follow_template import TemplateExtras
from spmd_rl.gateway.plan import SessionParts
from spmd_rl.gateway.replies import ReplyFormat, choose_format
from spmd_rl.gateway.session import NO_TURNS, REWRITTEN, Session
from spmd_rl.gateway.sessions import Sessions, sampling_rules
from spmd_rl.gateway.turns import ALL, MAIN, Branches
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.types.samples import Sample
from tests.unit.data.chat_templates import CHATML, QWEN
from tests.unit.gateway.exact import check_exact
from tests.unit.gateway.fakes import (
    CALL_FORM,
    FakeEngine,
    FakeTexts,
    in_event_loop,
    prompt_of,
)

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
END = "<|end|>"


def user(text: str) -> dict[str, Any]:
    return message("user", text)


def said(drawn: PolicyReply) -> dict[str, Any]:
    return drawn.message


def make(replies: Any, chat_template: str = CHATML, **config: Any) -> tuple[Session, FakeEngine]:
    texts = FakeTexts(chat_template)
    engine: Any = FakeEngine(texts, replies)
    parts = SessionParts(GatewayConfig(**config), texts, ReplyFormat(CALL_FORM), "policy")
    ctx = HookContext({}, 1, 3)
    session = Sessions(parts, "http://x").open(ctx, prompt_of(), engine, SamplingRules(1.0))
    return session, engine


async def draw(
    session: Session, messages: list[Any], *, again: bool = False, lost: bool = False, **asked: Any
) -> PolicyReply:
    """Draw a reply, as a retry if `again`. `lost` says that the client misses the answer."""
    call = session.ask(
        ReplyRequest(model="", messages=messages, **asked),
        repr((messages, asked)).encode(),
        again=again,
    )
    call.join()
    try:
        return await asyncio.shield(call.task)
    finally:
        session.leave(call, answered=not lost)


def run(play: Awaitable[Any]) -> Any:
    return asyncio.run(play)  # type: ignore[arg-type]


@in_event_loop
async def test_one_conversation_is_one_sample() -> None:
    session, engine = make(["one" + END, "two" + END])
    first = await draw(session, [user("a")])
    assert (first.message["content"], first.finish) == ("one", "stop")
    second = await draw(session, [user("a"), said(first), user("b")])
    assert second.begun.num_cached == len(first.prompt_ids) + len(first.data)
    (sample,) = session.samples()
    texts = FakeTexts()
    whole = texts.decode([*sample.context, *sample.tokens])
    messages = [user("a"), message("assistant", "one"), user("b"), message("assistant", "two")]
    assert whole == texts.render(messages, generation_prompt=False).removesuffix("\n")
    assert sample.messages == messages[1:]
    check_exact(session, engine)
    assert [one.reason for one in session.records] == ["new", "extends"]


@in_event_loop
async def test_a_tool_call_goes_back_and_forth() -> None:
    call = '<call>{"name" : "f",  "arguments": {"x": 1.0}}</call>'
    session, engine = make(["hm " + call + END, "4" + END])
    extras = TemplateExtras(TOOLS, {})
    first = await draw(session, [user("a")], extras=extras)
    assert first.finish == "tool_calls"
    (made,) = first.message["tool_calls"]
    client = {**made, "id": "other", "function": {"name": "f", "arguments": {"x": 1}}}
    back = message("assistant", "hm", tool_calls=[client])
    result = message("tool", "2", tool_call_id="other")
    await draw(session, [user("a"), back, result], extras=extras)
    (sample,) = session.samples()
    assert call in FakeTexts().decode(sample.tokens), "what was drawn stands, letter by letter"
    check_exact(session, engine)


@in_event_loop
async def test_branches_share_what_was_drawn_and_learn_it_once() -> None:
    session, engine = make([text + END for text in ("one", "two", "three")])
    first = await draw(session, [user("a")])
    for text in "bc":
        await draw(session, [user("a"), said(first), user(text)])
    one, other = session.samples()
    assert one.mask.sum() > other.mask.sum()
    assert one.context.tolist() == other.context.tolist()
    check_exact(session, engine)


@in_event_loop
async def test_a_sub_agent_has_a_context_of_its_own() -> None:
    session, engine = make([text + END for text in ("one", "sub", "two")])
    first = await draw(session, [user("a")])
    await draw(session, [message("system", "sub"), user("x")])
    await draw(session, [user("a"), said(first), user("b")])
    assert len(session.samples()) == 2
    check_exact(session, engine)


def test_thoughts_that_a_template_drops_are_learned_all_the_same() -> None:
    thought = "<think>\nhm\n</think>\n\n"
    for mode, number in (("follow", 2), ("append", 1)):
        session, engine = make([thought + "one" + END, thought + "two" + END], QWEN, template=mode)

        async def play(session: Session = session) -> None:
            first = await draw(session, [user("a")])
            assert first.message["reasoning_content"] == "hm"
            await draw(session, [user("a"), message("assistant", "one"), user("b")])

        run(play())
        assert len(session.samples()) == number
        assert [one.rewritten for one in session.records] == [False, number == 2]
        check_exact(session, engine)


@in_event_loop
async def test_a_turn_that_was_cut_is_closed() -> None:
    session, engine = make(["one two three" + END, "b" + END])
    first = await draw(session, [user("a")], max_tokens=2)
    assert first.finish == "length"
    await draw(session, [user("a"), said(first), user("b")])
    (sample,) = session.samples()
    texts = FakeTexts()
    at = sample.tokens.tolist().index(texts.eos_ids[0])
    assert not sample.mask[at], "the end token of a turn that was cut is observed"
    check_exact(session, engine)


@in_event_loop
async def test_token_ids_go_on_where_they_were_drawn() -> None:
    session, engine = make(["one" + END, "two" + END, "three" + END])

    async def ask(ids: list[int]) -> PolicyReply:
        return await draw(session, [], token_ids=np.array(ids, np.int32), max_tokens=len(ids))

    first = await ask([1, 2, 90])
    held = [*first.prompt_ids.tolist(), *first.data.tokens.tolist()]
    second = await ask([*held, 91, 92])
    assert second.begun.num_cached == len(held)
    third = await ask([1, 2, 90, 91])
    assert third.begun.num_cached == 0
    assert len(session.samples()) == 2
    check_exact(session, engine)


def numbered() -> Any:
    numbers = itertools.count()
    return lambda prompt: f"{next(numbers)}{END}"


async def opened(session: Session, number: int) -> list[asyncio.Task[PolicyReply]]:
    """Ask the same so often at once, and return the calls once all are open."""
    before = len(session._open)
    calls = [asyncio.create_task(draw(session, [user("a")])) for _ in range(number)]
    while len(session._open) < before + number:
        await asyncio.sleep(0)
    return calls


@in_event_loop
async def test_equal_requests_at_once_are_draws_of_their_own() -> None:
    session, engine = make(numbered())
    drawn = await asyncio.gather(*(draw(session, [user("a")]) for _ in range(8)))
    assert len({one.message["content"] for one in drawn}) == 8
    assert len({one.begun.id for one in drawn}) == 8
    assert len(session.samples()) == 8
    check_exact(session, engine)


@in_event_loop
async def test_a_retry_joins_the_call_that_is_open_or_answered() -> None:
    session, engine = make(numbered())
    engine.gate = asyncio.Event()
    (waiting,) = await opened(session, 1)
    retry = asyncio.create_task(draw(session, [user("a")], again=True))
    await engine.started.wait()
    engine.gate.set()
    first = await waiting
    assert (await retry) is first
    assert (await draw(session, [user("a")], again=True)) is first
    assert len(session.samples()) == 1
    check_exact(session, engine)


@in_event_loop
async def test_a_retry_gets_the_answer_that_its_client_has_missed() -> None:
    session, _ = make(numbered())
    whole = [draw(session, [user("a")], lost=place == 1) for place in range(3)]
    missed = (await asyncio.gather(*whole))[1]
    assert (await draw(session, [user("a")], again=True)) is missed


@in_event_loop
async def test_retries_of_what_got_no_answer_are_draws_of_their_own() -> None:
    """Of equal requests at once two are refused, one hangs up, and a later one fails."""
    session, engine = make(numbered(), max_waiting=3)
    engine.gate = asyncio.Event()
    calls = await opened(session, 3)
    for _ in range(2):
        with pytest.raises(Refused):
            await draw(session, [user("a")])
    calls[0].cancel()
    await asyncio.wait(calls[:1])
    while len(session._open) == 3:
        await asyncio.sleep(0)
    retries = [asyncio.create_task(draw(session, [user("a")], again=True))]
    while len(session._open) < 3:
        await asyncio.sleep(0)
    engine.gate.set()
    drawn = await asyncio.gather(*calls[1:], *retries)
    drawn += [await draw(session, [user("a")], again=True) for _ in range(2)]
    engine.problem = SpmdError("no more pages")
    with pytest.raises(SpmdError):
        await draw(session, [user("a")])
    engine.problem = None
    drawn.append(await draw(session, [user("a")], again=True))
    assert len({one.begun.id for one in drawn}) == 6
    assert (await draw(session, [user("a")], again=True)) in drawn
    assert len(session.samples()) == 6


@in_event_loop
async def test_a_client_that_leaves_loses_its_turn_alone() -> None:
    session, engine = make(["one" + END, "lost" + END, "two" + END])
    first = await draw(session, [user("a")])
    engine.gate, engine.started = asyncio.Event(), asyncio.Event()
    more = [user("a"), said(first), user("b")]
    call = session.ask(ReplyRequest(model="", messages=more), b"x", again=False)
    call.join()
    await engine.started.wait()
    session.leave(call)
    await asyncio.wait([call.task])
    assert call.task.cancelled()
    engine.gate = None
    await draw(session, more)
    assert [one.end for one in session.records] == ["answered", "lost", "answered"]
    assert len(engine.cancelled) == 1
    (sample,) = session.samples()
    assert "lost" not in FakeTexts().decode(sample.tokens)
    check_exact(session, engine)


@in_event_loop
async def test_a_failed_turn_is_no_turn() -> None:
    session, engine = make(["one" + END, "two" + END])
    engine.problem = SpmdError("no more pages")
    with pytest.raises(SpmdError, match="no more pages"):
        await draw(session, [user("a")])
    engine.problem = None
    await draw(session, [user("a")])
    assert [one.end for one in session.records] == ["failed", "answered"]
    check_exact(session, engine)


@in_event_loop
async def test_too_many_calls_wait() -> None:
    session, engine = make(lambda prompt: "x" + END, max_waiting=2)
    engine.gate = asyncio.Event()
    waiting = [asyncio.ensure_future(draw(session, [user(text)])) for text in "ab"]
    await engine.started.wait()
    with pytest.raises(Refused) as caught:
        await draw(session, [user("c")])
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    engine.gate.set()
    await asyncio.gather(*waiting)
    await draw(session, [user("c")])


@in_event_loop
async def test_a_closed_session_ends_its_calls_and_its_key() -> None:
    session, engine = make(lambda prompt: "x" + END)
    engine.gate = asyncio.Event()
    waiting = asyncio.ensure_future(draw(session, [user("a")]))
    await engine.started.wait()
    session.close()
    session.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(Refused) as caught:
        await draw(session, [user("b")])
    assert caught.value.status == 401
    assert session.samples() == []


def test_a_prompt_that_fills_the_context_is_refused_by_its_code() -> None:
    session, _ = make(["x"])
    long = user("b" * (1 << 17))
    with pytest.raises(Refused) as caught:
        run(draw(session, [long]))
    assert caught.value.code == "context_length_exceeded"
    assert session.samples() == []


@in_event_loop
async def test_the_share_of_rewritten_turns_is_told() -> None:
    session, _ = make(lambda prompt: "x" + END)
    await draw(session, [user("a")])
    await draw(session, [user("a"), message("assistant", "never drawn"), user("b")])
    session.close()
    assert session._ctx.metrics == {REWRITTEN: 0.5}


@pytest.mark.parametrize("kind", ["head", "window", "summary"])
@in_event_loop
async def test_calls_that_begin_anew_after_replies_of_the_session_are_rewritten(kind: str) -> None:
    """A system prompt that changes, and a window of the last messages; no reply is in a summary."""
    numbers = itertools.count()
    session, _ = make(lambda prompt: f"{next(numbers)}{END}")
    past: list[Any] = [user("a")]
    for turn in range(4):
        asked = {
            "head": [message("system", f"It is 12:0{turn}."), *past],
            "window": past[-3:] if turn < 2 else past[-2:],
            "summary": [user(f"so far: {turn}")],
        }[kind]
        past = [*past, said(await draw(session, asked)), user(f"b{turn}")]
    session.close()
    shares = {"head": 0.75, "window": 0.5, "summary": 0.0}
    assert session._ctx.metrics == {REWRITTEN: shares[kind]}


@pytest.mark.parametrize("command", ["agent.gateway", "gateway"])
def test_tools_need_a_known_form(command: str) -> None:
    """The settings of a run and of `spmd-rl serve` have other names."""
    with pytest.raises(ConfigError, match=f"^{command}.response_template = 'x': no file"):
        choose_format("x", None, command)
    texts = FakeTexts()
    parts = SessionParts(GatewayConfig(), texts, ReplyFormat(None), "policy", settings=command)
    engine: Any = FakeEngine(texts, ["x"])
    session = Sessions(parts).open(HookContext(), prompt_of(), engine)
    with pytest.raises(Refused, match=f"name a form in {command}.response_template"):
        run(draw(session, [user("a")], extras=TemplateExtras(TOOLS, {})))


def test_tools_need_a_template_that_shows_them() -> None:
    texts = FakeTexts(QWEN)
    parts = SessionParts(GatewayConfig(), texts, ReplyFormat(CALL_FORM), "policy")
    engine: Any = FakeEngine(texts, ["x"])
    session = Sessions(parts).open(HookContext(), prompt_of(), engine)
    with pytest.raises(Refused, match="chat template of this model leaves out tools"):
        run(draw(session, [user("a")], extras=TemplateExtras(TOOLS, {})))
    run(draw(session, [user("a")]))


@in_event_loop
async def test_a_call_beyond_the_last_turn_is_refused() -> None:
    texts = FakeTexts()
    parts = SessionParts(GatewayConfig(), texts, ReplyFormat(None), "policy")
    engine: Any = FakeEngine(texts, ["x" + END, "y" + END])
    session = Sessions(parts).open(HookContext(), prompt_of(), engine, max_turns=2)
    engine.gate = asyncio.Event()
    first = asyncio.create_task(draw(session, [user("a")]))
    second = asyncio.create_task(draw(session, [user("b")]))
    while len(engine.prompts) < 2:
        await asyncio.sleep(0)
    assert not session.is_over
    with pytest.raises(Refused, match=r"its 2 turns \(agent.max_turns\)") as caught:
        await draw(session, [user("c")])
    assert (caught.value.status, caught.value.code) == (400, NO_TURNS)
    engine.gate.set()
    assert said(await first) != said(await second)
    # the answer to a retry is no further turn
    request = repr(([user("a")], {})).encode()
    again = session.ask(ReplyRequest(model="", messages=[user("a")]), request, again=True)
    assert (await again.task).message == said(await first)
    assert session.is_over
    assert len(session.samples()) == 2


def is_of_sub_agent(sample: Sample) -> bool:
    return sample.messages[-1]["content"] == "sub"


@pytest.mark.parametrize(
    ("learn", "num_samples", "num_turns"), [(ALL, 5, 6), (MAIN, 3, 4), (is_of_sub_agent, 1, 1)]
)
@in_event_loop
async def test_branches_that_are_not_chosen_claim_no_turn(
    learn: Any, num_samples: int, num_turns: int
) -> None:
    """A sub-agent, an abandoned retry, and a past that the template rewrites."""
    texts = FakeTexts(QWEN)
    parts = SessionParts(GatewayConfig(), texts, ReplyFormat(CALL_FORM), "policy", Branches(learn))
    thought = "<think>\nt\n</think>\n\n"
    says = [f"{thought}one", "sub", "bad", f"{thought}two", "three", "four"]
    engine: Any = FakeEngine(texts, [text + END for text in says])
    session = Sessions(parts).open(HookContext(), prompt_of(), engine)
    past = [user("a")]
    past = [*past, said(await draw(session, past)), user("b")]
    await draw(session, [user("be a sub-agent")])
    await draw(session, [*past[:-1], user("c")])
    past = [*past, said(await draw(session, past)), user("d")]
    past = [*past, said(await draw(session, past)), user("e")]
    await draw(session, past)
    samples = session.samples()
    starts = [np.flatnonzero(np.diff(one.mask.astype(int), prepend=0) == 1) for one in samples]
    assert len(samples) == num_samples
    assert sum(map(len, starts)) == num_turns


def test_a_function_that_chooses_no_branch_has_failed() -> None:
    parts = SessionParts(
        GatewayConfig(), FakeTexts(), ReplyFormat(None), "policy", Branches(lambda sample: None)
    )
    engine: Any = FakeEngine(parts.texts, ["x" + END])
    session = Sessions(parts).open(HookContext(), prompt_of(), engine)
    run(draw(session, [user("a")]))
    with pytest.raises(EpisodeFailure, match="agent.learn returned None"):
        session.samples()


def test_rules_come_from_the_recipe() -> None:
    found = sampling_rules({"sampling": {"temperature": 0.7, "top_p": 1.0, "stop_ids": [4]}})
    assert found == SamplingRules(0.7, 1.0, stop_ids=(4,))
    assert sampling_rules({}) == SamplingRules()


steps = st.lists(
    st.tuples(
        st.integers(0, 5),  # which conversation goes on
        st.integers(0, 3),  # how many of its messages are kept
        st.sampled_from(["a", "b", " ", "<think>x</think>"]),  # what the user says
        st.booleans(),  # whether thoughts are sent back
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("mode", ["follow", "append"])
@pytest.mark.parametrize("template", [CHATML, QWEN])
@settings(max_examples=25, deadline=None)
@given(plan=steps, drawn=st.lists(st.sampled_from(["x", " y ", "<think>\nz\n</think>\n\nw", ""])))
def test_whatever_agents_do_every_turn_is_learned_once(
    template: str, mode: Any, plan: Any, drawn: list[str]
) -> None:
    texts = [*drawn, *["x"] * len(plan)]
    session, engine = make([text + END for text in texts], template, template=mode)

    async def play() -> None:
        conversations: list[list[Any]] = [[]]
        for which, kept, text, keeps_thoughts in plan:
            before = conversations[which % len(conversations)]
            past = before[: len(before) - 2 * kept] if kept else before
            asked = [*past, user(text)]
            sent = [dict(one) for one in asked]
            if not keeps_thoughts:
                for one in sent:
                    one.pop("reasoning_content", None)
            reply = await draw(session, sent)
            conversations.append([*asked, said(reply)])

    run(play())
    check_exact(session, engine)

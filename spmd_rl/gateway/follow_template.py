"""Token ids with which a conversation goes on after tokens that were drawn.

Tokens that the session holds are never made again from text. Where the chat template's text begins
with the text that is held, only the tail is encoded. Where it does not, the conversation begins a
sibling, whose context is what the template makes of all messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from spmd_rl.data.render.messages import Message
from spmd_rl.errors import SpmdError
from spmd_rl.hooks.texts import EpisodeTexts
from spmd_rl.rewards.answers.final_text import THINKING, opens_thought
from spmd_rl.types.samples import MODEL

TemplateMode = Literal["follow", "append"]
# what stands in for a question, an answer and a thought; no model writes it
_ASKED, _ANSWERED, _THOUGHT = "question\u2060", "answer\u2060", "thought\u2060"


class TemplateExtras(NamedTuple):
    """What a template shows besides messages: tools, and its own arguments."""

    tools: list[Any]
    template_kwargs: dict[str, Any]


@dataclass(frozen=True)
class HeldText:
    """What is held of a conversation.

    `messages` are all messages up to the last reply. `replies` has the place of each reply in them,
    and its text as it was drawn. `text` is the text of all tokens, and `end` that of the token that
    ended the last turn, or "".
    """

    messages: list[Message]
    replies: dict[int, str]
    text: str
    end: str


@dataclass(frozen=True)
class NextPrompt:
    """Prompt of a turn: `ids` follow the held tokens, or are a context of their own.

    `text` is the text of `ids`.
    """

    ids: list[int]
    text: str
    is_context: bool


def next_prompt(
    texts: EpisodeTexts,
    extras: TemplateExtras,
    held: HeldText | None,
    rest: Sequence[Message],
    mode: TemplateMode,
) -> NextPrompt:
    """Return the token ids from which the policy draws its next reply.

    Raises: SpmdError with what the template says, when it refuses the messages.
    """

    def render(messages: Sequence[Message]) -> str:
        return texts.render(messages, extras.tools, extras.template_kwargs)

    if held is None:
        text = render(rest)
        return NextPrompt(texts.encode(text), text, is_context=True)
    structured = [*held.messages, *rest]
    text = _rendered(render, structured)
    if not text.startswith(held.text) and _shows_thoughts(render, structured):
        as_drawn = _rendered(render, [*_as_drawn(held), *rest])
        text = as_drawn if as_drawn.startswith(held.text) else text
    if text.startswith(held.text):
        tail = text[len(held.text) :]
        return NextPrompt(texts.encode(tail), tail, is_context=False)
    if mode == "append" and (added := _appended(texts, extras, held, rest)) is not None:
        return NextPrompt(texts.encode(added), added, is_context=False)
    text = text or render(structured)  # what the template refuses is raised here
    return NextPrompt(texts.encode(text), text, is_context=True)


def opening_of(prompt_text: str) -> str:
    """Return what a prompt has written of the reply: a tag that opens a thought, or ""."""
    return prompt_text[prompt_text.rindex(THINKING) :] if opens_thought(prompt_text) else ""


def _rendered(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str:
    """Return what the template makes of the messages; "" where it refuses them."""
    try:
        return render(messages)
    except SpmdError:
        return ""


def _shows_thoughts(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message]
) -> bool:
    """Whether the template shows the thought of every reply.

    Where it drops one, the reply must not be put back as it was drawn, with its thought.
    """
    marks, marked = [], []
    for number, one in enumerate(messages):
        if one.get("reasoning_content"):
            marks.append(f"{_THOUGHT}{number}.")
            one = {**one, "reasoning_content": marks[-1]}
        marked.append(one)
    text = _rendered(render, marked) if marks else ""
    return all(mark in text for mark in marks)


def _as_drawn(held: HeldText) -> list[Message]:
    """Return the messages with the replies as they were drawn, in which calls are text."""
    messages = list(held.messages)
    for place, text in held.replies.items():
        messages[place] = {"role": MODEL, "content": text}
    return messages


def _appended(
    texts: EpisodeTexts, extras: TemplateExtras, held: HeldText, rest: Sequence[Message]
) -> str | None:
    """Return what the template writes after a reply, for the rest of the messages.

    A short conversation stands in for the one that is held, so that nothing earlier is rewritten.
    None: the template does not show it.
    """
    asked = {"role": "user", "content": _ASKED}
    plain = {"role": MODEL, "content": _ANSWERED}

    def render(messages: Sequence[Message], prompt: bool) -> str:
        return texts.render(messages, [], extras.template_kwargs, generation_prompt=prompt)

    def after_plain() -> str:
        whole = render([asked, plain, *rest], True)
        return whole[whole.index(_ANSWERED) + len(_ANSWERED) :]

    def after_reply() -> str:
        shown, reply = render([asked, plain], False), held.messages[-1]
        end = shown[shown.index(_ANSWERED) + len(_ANSWERED) :]
        before, whole = render([asked, reply], False), render([asked, reply, *rest], True)
        if not (before.endswith(end) and whole.startswith(before)):
            raise ValueError("the template rewrites the reply")
        return end + whole[len(before) :]

    # the result of a tool may need the call that it answers
    ways = [after_plain, after_reply] if rest[0]["role"] != "tool" else [after_reply, after_plain]
    for way in ways:
        try:
            return way().removeprefix(held.end)
        except (SpmdError, ValueError):  # ValueError: the stand-in is not shown as it is
            continue
    return None

"""Answers of the rank's tokenizer to episodes: token ids of a text, and texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from spmd_rl.data.chat import Chat, Template, render
from spmd_rl.data.messages import messages_of, tools_of
from spmd_rl.errors import SpmdError
from spmd_rl.hooks.wire.messages import AskText, AskTokens, Question, Reply


class EpisodeTokenizer(Template, Protocol):
    """The part of a tokenizer that episodes need."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


def reply_of(question: Question, tokenizer: Callable[[], EpisodeTokenizer] | None) -> Reply:
    """Return the answer to a question, or why there is none."""
    ids = question.call_id, question.ask_id
    if tokenizer is None:
        return Reply(*ids, "there is no tokenizer here")
    if isinstance(question, AskTokens):
        (tokens,) = tokenizer()([question.text], add_special_tokens=False)["input_ids"]
        return Reply(*ids, tokens=list(tokens))
    if isinstance(question, AskText):
        try:
            return Reply(*ids, text=tokenizer().decode(question.tokens.tolist()))
        # a tokenizer may raise anything on an id that it does not have
        except Exception as error:  # noqa: BLE001
            return Reply(*ids, f"decode: {type(error).__name__}: {error}")
    try:
        messages = messages_of("messages", question.messages)
        tools = tools_of("tools", question.tools)
        chat = Chat("messages", messages, tools, question.template_kwargs)
        return Reply(*ids, text=render(chat, tokenizer(), generation_prompt=True))
    except SpmdError as error:
        return Reply(*ids, str(error))

"""Answers of the rank's tokenizer to episodes: token ids of a text, and texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from spmd_rl.data.chat import Chat, Template, render
from spmd_rl.data.messages import messages_of, tools_of
from spmd_rl.errors import SpmdError
from spmd_rl.hooks.wire.messages import AskText, AskTokens, Encoded, Question, Refused, Text


class EpisodeTokenizer(Template, Protocol):
    """The part of a tokenizer that episodes need."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


class EpisodeTexts:
    """Answers questions of episodes. `tokenizer` is asked for when the first question comes."""

    def __init__(self, tokenizer: Callable[[], EpisodeTokenizer] | None) -> None:
        self._tokenizer = tokenizer

    def answer(self, question: Question) -> Encoded | Text | Refused:
        """Return the answer to a question, or why there is none."""
        call_id, ask_id = question.call_id, question.ask_id
        if self._tokenizer is None:
            return Refused(call_id, ask_id, "there is no tokenizer here")
        tokenizer = self._tokenizer()
        if isinstance(question, AskTokens):
            (ids,) = tokenizer([question.text], add_special_tokens=False)["input_ids"]
            return Encoded(call_id, ask_id, list(ids))
        if isinstance(question, AskText):
            try:
                text = tokenizer.decode(question.tokens.tolist())
            # a tokenizer may raise anything on an id that it does not have
            except Exception as error:  # noqa: BLE001
                return Refused(call_id, ask_id, f"decode: {type(error).__name__}: {error}")
            return Text(call_id, ask_id, text)
        try:
            messages = messages_of("messages", question.messages)
            tools = tools_of("tools", question.tools)
            chat = Chat("messages", messages, tools, question.template_kwargs)
            text = render(chat, tokenizer, generation_prompt=True)
        except SpmdError as error:
            return Refused(call_id, ask_id, str(error))
        return Text(call_id, ask_id, text)

"""Texts of an episode: the tokenizer and the chat template of the run's model, in its process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.render.chat import Chat, render
from spmd_rl.data.render.eos import eos_ids
from spmd_rl.data.render.messages import messages_of, tools_of
from spmd_rl.data.render.template_arguments import unread
from spmd_rl.data.render.token_bytes import TokenBytes
from spmd_rl.errors import SpmdError
from spmd_rl.model.tokenizer import FolderTokenizer, load_tokenizer

_MARK = "content\u2060"  # no template has it
_TOOL_NAME = "a_tool_that_no_template_names"
_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}


class EpisodeTexts:
    """Tokenizer and chat template of a model, which `load` returns when they are first used.

    Any thread of the process may call it, and no call waits for the rank.
    """

    def __init__(self, load: Callable[[], FolderTokenizer]) -> None:
        self._load = load

    @staticmethod
    def of_folder(folder: str) -> EpisodeTexts:
        """Return those of a model folder. Each use raises ConfigError if it has no tokenizer."""
        return EpisodeTexts(partial(load_tokenizer, folder))

    @property
    def chat_template(self) -> str | None:
        """The text of the default template; None where the model has none."""
        template = self._tokenizer.chat_template
        return template.get("default") if isinstance(template, Mapping) else template

    @cached_property
    def shows_texts(self) -> bool:
        """Whether the chat template shows a content that is a text, and not a list of parts.

        Raises: SpmdError with what the template says, when it refuses it.
        """
        return _MARK in self.render([{"role": "user", "content": _MARK}])

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the chat template tells the model which tools there are.

        Raises: SpmdError with what the template says, when it refuses them.
        """
        return _TOOL_NAME in self.render([{"role": "user", "content": _MARK}], [_TOOL])

    def unread(self, names: Iterable[str]) -> list[str]:
        """Return which of these arguments no chat template of the model reads."""
        templates = self._tokenizer.chat_template
        return [name for name in names if templates is None or unread([name], templates)]

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end what the model says."""
        return tuple(eos_ids(self._tokenizer))

    @property
    def context_tokens(self) -> int:
        """Positions of the model."""
        return self._tokenizer.context

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text, with the tokenizer's special tokens around it or not."""
        (tokens,) = self._tokenizer([text], add_special_tokens=special_tokens)["input_ids"]
        return list(tokens)

    def decode(
        self, tokens: Sequence[int] | NDArray[np.integer], *, skip_special_tokens: bool = False
    ) -> str:
        """Return the text of token ids.

        Raises: ValueError for a negative number; SpmdError for an id that the tokenizer refuses.
        """
        ids = np.asarray(tokens, np.int32)
        if (ids < 0).any():
            raise ValueError("decode: token ids are not negative")
        try:
            return self._tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)
        except Exception as error:  # a tokenizer may raise anything on an id that it does not have
            raise SpmdError(f"decode: {type(error).__name__}: {error}") from error

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character."""
        if self._bytes is None:  # a tokenizer in Python, which shows text alone
            return self.decode([token]).encode()
        return self._bytes.of(token)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Return what the chat template makes of messages.

        `template_kwargs` are more arguments of the template. With `generation_prompt`, the text
        ends with the beginning of the next assistant turn.
        Raises: SpmdError with what the template says, when it refuses the messages.
        """
        turns = messages_of("messages", list(messages))
        given = tools_of("tools", list(tools or ()))
        chat = Chat("messages", turns, given, dict(template_kwargs or {}))
        return render(chat, self._tokenizer, generation_prompt=generation_prompt)

    @cached_property
    def _bytes(self) -> TokenBytes | None:
        rust = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if rust is None else TokenBytes(rust)

    @cached_property
    def _tokenizer(self) -> FolderTokenizer:
        return self._load()

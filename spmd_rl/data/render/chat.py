"""Chats of records: what a tokenizer's chat template gets, and the text that it makes of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from spmd_rl.config.combinations import OFF, ON, Combination, refuse
from spmd_rl.data.files.record import DataRecord
from spmd_rl.data.render.messages import (
    Message,
    begins_with_system,
    messages_of,
    object_of,
    tools_of,
    written_messages,
)
from spmd_rl.data.render.template_arguments import GIVEN, misread
from spmd_rl.data.render.tokenizer import Tokenizer
from spmd_rl.errors import ConfigError, DataError, SpmdError

MAX_STEPS = 20_000_000  # lines of a compiled template; 100,000 messages take a few millions
_FILE = "<template>"  # where jinja says that the code of a template stands


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """Settings by which a prompt is rendered."""

    prompt_key: str = "prompt"  # text, or a list of chat messages
    chat_template: bool = False  # apply the tokenizer's chat template (with a generation prompt)
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # arguments for the chat template
    template_kwargs_key: str = ""  # a record's own arguments for it, which go before those for all
    tools_key: str = "tools"  # a record's tools: a list, or one as JSON text; "": ignore them
    system: str = ""  # the system prompt of records that have none of their own
    system_key: str = ""  # a record's own system prompt, which goes before the one for all

    def __post_init__(self) -> None:
        refuse(REFUSED, self)
        if given := sorted(GIVEN & self.template_kwargs.keys()):
            raise ConfigError(f"prompts.template_kwargs cannot have {given[0]!r}")
        if problem := misread(self.template_kwargs):
            raise ConfigError(f"prompts.template_kwargs: {problem}")

    @property
    def chat_keys(self) -> set[str]:
        """The keys of a record whose values are given to the chat template."""
        if not self.chat_template:
            return {self.prompt_key}
        keys = {self.prompt_key, self.template_kwargs_key, self.tools_key, self.system_key}
        return keys - {""}


REFUSED = tuple(
    Combination(
        {name: ON, "chat_template": OFF}, "prompts.{0.key} needs prompts.chat_template = true"
    )
    for name in ("template_kwargs", "template_kwargs_key", "system", "system_key")
)


@dataclass(frozen=True)
class Chat:
    """What a chat template gets for one record. `where` names file, line and field.

    The first `num_added` messages are not the record's own.
    """

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    num_added: int = 0

    def place(self, number: int) -> str:
        """Return where a message of the chat stands."""
        return f"{self.where}[{own}]" if (own := number - self.num_added) >= 0 else self.where

    def as_data(self) -> dict[str, Any]:
        """Return it as `Prompt.chat`, without what is empty."""
        tools = {"tools": self.tools} if self.tools else {}
        kwargs = {"template_kwargs": self.template_kwargs} if self.template_kwargs else {}
        return {"messages": self.messages} | tools | kwargs


def chat_of(record: DataRecord, cfg: ChatFormat) -> Chat | None:
    """Return the chat of a record, whose prompt is a text or messages; None without a template.

    Messages and tools may be written as JSON text.

    Raises: DataError for messages or tools without a template, and for what has another form.
    """
    where = f"{record.where}: {cfg.prompt_key}"
    tools_where = f"{record.where}: {cfg.tools_key}"
    prompt, tools = record.value(cfg.prompt_key), _optional(record, cfg.tools_key)
    given = written_messages(where, prompt)
    if not cfg.chat_template:
        if given is not None:
            raise DataError(where, "a list of messages needs chat_template = true")
        if tools and tools != "[]":
            raise DataError(
                tools_where,
                'tools need prompts.chat_template = true; --prompts.tools_key="" ignores them',
            )
        return None
    if given is None:
        messages = [{"role": "user", "content": record.text(cfg.prompt_key)}]
    else:
        messages = messages_of(where, given)
    kwargs = cfg.template_kwargs | _own_kwargs(record, cfg.template_kwargs_key)
    system = _system(messages, record, cfg)
    return Chat(
        where, [*system, *messages], tools_of(tools_where, tools), kwargs, num_added=len(system)
    )


def render(
    chat: Chat, tokenizer: Tokenizer, num_messages: int | None = None, *, generation_prompt: bool
) -> str:
    """Return the text of a chat, or of its first messages, by the tokenizer's template.

    `generation_prompt` says whether the text ends with the beginning of the next assistant turn.
    Raises: DataError with what the template says, when it refuses the chat or loops.
    """
    kwargs: dict[str, Any] = chat.template_kwargs | ({"tools": chat.tools} if chat.tools else {})
    try:
        with bounded_steps():
            text: str = tokenizer.apply_chat_template(
                chat.messages[:num_messages],
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **kwargs,
            )
        text.encode()
    except SpmdError:
        raise
    except UnicodeEncodeError as error:
        raise DataError(chat.where, "half of a surrogate pair is not text") from error
    except Exception as error:  # a template may raise anything
        sentence = " ".join(str(error).split()) or type(error).__name__
        raise DataError(chat.where, f"the chat template refuses this: {sentence}") from error
    return text


def _system(messages: list[Message], record: DataRecord, cfg: ChatFormat) -> list[Message]:
    """Return the system prompt that the messages lack, as one message or none."""
    own = ""
    if cfg.system_key and _optional(record, cfg.system_key) is not None:
        own = record.text(cfg.system_key)
    if not begins_with_system(messages):
        system = own or cfg.system
        return [{"role": "system", "content": system}] if system else []
    if own:
        raise DataError(
            f"{record.where}: {cfg.system_key}",
            "this record has a second system prompt: its messages begin with one",
        )
    return []


def _own_kwargs(record: DataRecord, key: str) -> dict[str, Any]:
    where = f"{record.where}: {key}"
    kwargs = object_of(where, _optional(record, key))
    if given := sorted(GIVEN & kwargs.keys()):
        raise DataError(where, f"template arguments cannot have {given[0]!r}")
    if problem := misread(kwargs):
        raise DataError(where, problem)
    return {name: value for name, value in kwargs.items() if value is not None}


def _optional(record: DataRecord, key: str) -> Any:
    return record.get(key) if key else None


@contextmanager
def bounded_steps() -> Iterator[None]:
    """Let templates take `MAX_STEPS` in this thread.

    A thread cannot be stopped from outside, so the interpreter asks at each line.
    Raises: RuntimeError after the last step.
    """
    left = most = MAX_STEPS

    def at_line(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError(
                f"it loops, as it has run {most:,} lines: give the model's folder another one"
            )
        return at_line

    def at_call(frame: FrameType, event: str, given: Any) -> Any:
        return at_line if frame.f_code.co_filename == _FILE else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(before)

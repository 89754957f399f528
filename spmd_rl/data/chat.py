"""Chats of records: what a tokenizer's chat template gets, and the text that it makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from spmd_rl.data.files import DataRecord
from spmd_rl.data.messages import Message, begins_with_system, messages_of, object_of, tools_of
from spmd_rl.errors import ConfigError, DataError, SpmdError

# arguments of transformers' `apply_chat_template` that this package gives
_GIVEN = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tools",
}


class Template(Protocol):
    """The part of a tokenizer that applies its chat template."""

    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """Settings by which a prompt is rendered."""

    prompt_key: str = "prompt"  # text, or a list of chat messages
    chat_template: bool = False  # apply the tokenizer's chat template, with the generation prompt
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # arguments for the chat template
    template_kwargs_key: str = ""  # a record's own arguments for it, which go before those for all
    tools_key: str = "tools"  # a record's tools: a list, or one as JSON text; "": ignore them
    system: str = ""  # the system prompt of records that have none of their own
    system_key: str = ""  # a record's own system prompt, which goes before the one for all

    def __post_init__(self) -> None:
        if not self.chat_template:
            for name in ("template_kwargs", "template_kwargs_key", "system", "system_key"):
                if getattr(self, name):
                    raise ConfigError(f"prompts.{name} needs prompts.chat_template = true")
        if given := sorted(_GIVEN & self.template_kwargs.keys()):
            raise ConfigError(f"prompts.template_kwargs cannot have {given[0]!r}")

    @property
    def chat_keys(self) -> set[str]:
        """The keys of a record whose values are given to the chat template."""
        if not self.chat_template:
            return {self.prompt_key}
        keys = {self.prompt_key, self.template_kwargs_key, self.tools_key, self.system_key}
        return keys - {""}


@dataclass(frozen=True)
class Chat:
    """What a chat template gets for one record. `where` names file, line and field."""

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]

    def as_data(self) -> dict[str, Any]:
        """Return it as `Prompt.chat`, without what is empty."""
        tools = {"tools": self.tools} if self.tools else {}
        kwargs = {"template_kwargs": self.template_kwargs} if self.template_kwargs else {}
        return {"messages": self.messages} | tools | kwargs


def chat_of(record: DataRecord, cfg: ChatFormat) -> Chat | None:
    """Return the chat of a record, whose prompt is a text or messages; None without a template.

    Raises: DataError for messages or tools without a template, and for what has another form.
    """
    where = f"{record.where}: {cfg.prompt_key}"
    tools_where = f"{record.where}: {cfg.tools_key}"
    prompt, tools = record.value(cfg.prompt_key), _optional(record, cfg.tools_key)
    if not cfg.chat_template:
        if isinstance(prompt, list):
            raise DataError(where, "a list of messages needs chat_template = true")
        if tools and tools != "[]":
            raise DataError(
                tools_where,
                'tools need prompts.chat_template = true; --prompts.tools_key="" ignores them',
            )
        return None
    if isinstance(prompt, list):
        messages = messages_of(where, prompt)
    else:
        messages = [{"role": "user", "content": record.text(cfg.prompt_key)}]
    kwargs = cfg.template_kwargs | _own_kwargs(record, cfg.template_kwargs_key)
    messages = _with_system(messages, record, cfg)
    return Chat(where, messages, tools_of(tools_where, tools), kwargs)


def render(
    chat: Chat, template: Template, num_messages: int | None = None, *, generation_prompt: bool
) -> str:
    """Return the text of a chat, or of its first messages, by the template.

    `generation_prompt` says whether the text ends with the beginning of the next assistant turn.
    Raises: DataError with what the template says, when it refuses the chat.
    """
    kwargs: dict[str, Any] = chat.template_kwargs | ({"tools": chat.tools} if chat.tools else {})
    try:
        text: str = template.apply_chat_template(
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


def refuse_ignored(chats: Sequence[Chat], template: Template) -> None:
    """Refuse chats of which the template does not show tools, tool calls or the system prompt.

    The first chat that has such a thing tells it for all.
    Raises: DataError.
    """
    changes = {
        "tools": _without_tools,
        "tool calls": _without_tool_calls,
        "system prompt": _with_another_system_prompt,
    }
    for name, change in changes.items():
        changed = ((chat, other) for chat in chats if (other := change(chat)))
        chat, other = next(changed, (None, None))
        if chat and other and _is_same(chat, other, template):
            raise DataError(chat.where, f"this model's chat template ignores the {name}")


def _without_tools(chat: Chat) -> Chat | None:
    return replace(chat, tools=[]) if chat.tools else None


def _without_tool_calls(chat: Chat) -> Chat | None:
    if not any(message.get("tool_calls") for message in chat.messages):
        return None
    messages = [{k: m[k] for k in m if k != "tool_calls"} for m in chat.messages]
    return replace(chat, messages=messages)


def _with_another_system_prompt(chat: Chat) -> Chat | None:
    first, *others = chat.messages
    if not begins_with_system(chat.messages):
        return None
    return replace(chat, messages=[first | {"content": first["content"] + "."}, *others])


def _is_same(chat: Chat, changed: Chat, template: Template) -> bool:
    """Whether the template makes the same text of both; a chat that it refuses is another."""
    text = render(chat, template, generation_prompt=True)
    try:
        return render(changed, template, generation_prompt=True) == text
    except DataError:
        return False


def _with_system(messages: list[Message], record: DataRecord, cfg: ChatFormat) -> list[Message]:
    """Return the messages with the system prompt in front that they lack."""
    own = ""
    if cfg.system_key and _optional(record, cfg.system_key) is not None:
        own = record.text(cfg.system_key)
    if not begins_with_system(messages):
        system = own or cfg.system
        return [{"role": "system", "content": system}, *messages] if system else messages
    if own:
        raise DataError(
            f"{record.where}: {cfg.system_key}",
            "this record has a second system prompt: its messages begin with one",
        )
    return messages


def _own_kwargs(record: DataRecord, key: str) -> dict[str, Any]:
    where = f"{record.where}: {key}"
    kwargs = object_of(where, _optional(record, key))
    if given := sorted(_GIVEN & kwargs.keys()):
        raise DataError(where, f"template arguments cannot have {given[0]!r}")
    return {name: value for name, value in kwargs.items() if value is not None}


def _optional(record: DataRecord, key: str) -> Any:
    return record.get(key) if key else None

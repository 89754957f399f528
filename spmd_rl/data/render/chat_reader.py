"""Chats of records as a model's chat template takes them, which must use all that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spmd_rl.data.files.record import DataRecord
from spmd_rl.data.render.chat import Chat, ChatFormat, chat_of, render
from spmd_rl.data.render.shown import ShownParts
from spmd_rl.data.render.template_arguments import unread
from spmd_rl.data.render.tokenizer import Tokenizer
from spmd_rl.errors import ConfigError, DataError

_ANSWER = "an answer"


class ChatReader:
    """Reads the chats of records.

    Raises: ConfigError where a template is wanted and there is none, and for an argument that it
    does not read.
    """

    def __init__(self, cfg: ChatFormat, tokenizer: Tokenizer) -> None:
        require_template(cfg, tokenizer)
        self._cfg, self._tokenizer = cfg, tokenizer
        self._shown = ShownParts(tokenizer)
        self._left_to_model: str | None = None  # None: not known yet

    def read(self, records: Sequence[DataRecord]) -> list[Chat | None]:
        """Return the chat of each record; None without a template.

        Raises: DataError for a chat of another form, and for what the template ignores.
        """
        chats = [chat_of(record, self._cfg) for record in records]
        for record, chat in zip(records, chats, strict=True):
            if chat:
                self._require_read(record, chat)
                self._shown.require([chat])
                if self._left_to_model is None:
                    self._left_to_model = _left_to_model(chat, self._tokenizer)
        return chats

    def notes(self) -> list[str]:
        """Return a sentence if the template has no generation prompt, where it needs one."""
        if not self._left_to_model:
            return []
        return [
            "this model's chat template has no generation prompt: the model itself must write "
            f"{self._left_to_model!r} before each answer"
        ]

    def _require_read(self, record: DataRecord, chat: Chat) -> None:
        own = chat.template_kwargs.keys() - self._cfg.template_kwargs.keys()
        if name := unread(own, self._tokenizer.chat_template):
            where = f"{record.where}: {self._cfg.template_kwargs_key}"
            raise DataError(where, f"this model's chat template does not read {name!r}")


def require_template(cfg: ChatFormat, tokenizer: Tokenizer) -> None:
    """Raise a ConfigError unless there is the template that the settings need.

    It must read the arguments that are for all records.
    """
    if not cfg.chat_template:
        return
    if not tokenizer.chat_template:
        raise ConfigError("chat_template is true, but this model's tokenizer has no chat template")
    if name := unread(cfg.template_kwargs, tokenizer.chat_template):
        raise ConfigError(
            f"prompts.template_kwargs: this model's chat template does not read {name!r}"
        )


def _left_to_model(chat: Chat, tokenizer: Tokenizer) -> str | None:
    """Return what a template without a generation prompt writes before an answer.

    "": it has one, or writes nothing but space. None: the chat cannot tell it.
    """
    roles = [message["role"] for message in chat.messages]
    num_messages = roles.index("assistant") if "assistant" in roles else len(roles)
    if not num_messages:
        return None
    asked = chat.messages[:num_messages]
    answered = replace(chat, messages=[*asked, {"role": "assistant", "content": _ANSWER}])
    try:
        prompt = render(chat, tokenizer, num_messages, generation_prompt=True)
        if prompt != render(chat, tokenizer, num_messages, generation_prompt=False):
            return ""
        whole = render(answered, tokenizer, generation_prompt=False)
    except DataError:
        return None
    added = whole.removeprefix(prompt)
    return added.partition(_ANSWER)[0].strip() if whole.startswith(prompt) else ""

"""Form of prompts in a data file: how they are rendered, tokenised and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spmd_rl.config.rules import at_least
from spmd_rl.data.files.record import DataRecord
from spmd_rl.data.render.chat import Chat, ChatFormat, chat_of, render
from spmd_rl.data.render.shown import ShownParts
from spmd_rl.data.render.template_arguments import unread
from spmd_rl.data.render.tokenizer import Tokenizer, beginning, begun_once
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
    num_messages = [*roles, "assistant"].index("assistant")
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


# limits of `check_prompts`, which then takes about 0.1 s
CHECKED_PROMPTS, CHECKED_CHARACTERS = 1000, 1 << 18


@dataclass(frozen=True, kw_only=True)
class PromptFormat(ChatFormat):
    """Settings by which prompts are read, whatever else stands in a record."""

    max_prompt_tokens: int = 0  # longer prompts are dropped; 0 keeps all
    # what becomes of records that the model's context cannot hold: the run ends, leaves them out,
    # or learns what fits of their answers
    too_long: Literal["refuse", "drop", "cut"] = "refuse"
    shuffle: bool = True  # use a new order every epoch; false: the order of the file
    seed: int = 0  # of the shuffling

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, {"max_prompt_tokens": 0})

    @property
    def answer_keys(self) -> tuple[str, ...]:
        """The keys of the answers that each record must have."""
        return ()

    def check_answer(self, record: DataRecord, key: str) -> None:
        """Raise a DataError unless the record has an answer of the right form under `key`."""
        record.text_or_number(key)

    @property
    def used_keys(self) -> set[str]:
        """The keys of a record that make prompt and answers: no others are in `Prompt.meta`."""
        return self.chat_keys.union(self.answer_keys)


class PromptEncoder:
    """Makes text and tokens of prompts, as the model sees them.

    Raises: as `ChatReader`.
    """

    def __init__(self, cfg: PromptFormat, tokenizer: Tokenizer) -> None:
        self._cfg, self._tokenizer = cfg, tokenizer
        self._reader = ChatReader(cfg, tokenizer)
        self._beginning = beginning(tokenizer)

    def encode(self, records: Sequence[DataRecord]) -> list[tuple[str, NDArray[np.int32]]]:
        """Return text and tokens of every record's prompt. Raises: DataError."""
        cfg, tokenizer = self._cfg, self._tokenizer
        texts = [
            render(chat, tokenizer, generation_prompt=True) if chat else record.text(cfg.prompt_key)
            for record, chat in zip(records, self._reader.read(records), strict=True)
        ]
        # a chat template writes its own special tokens
        encoded = tokenizer(texts, add_special_tokens=not cfg.chat_template)["input_ids"]
        if not cfg.chat_template:
            encoded = [begun_once(tokens, self._beginning) for tokens in encoded]
        for record, tokens in zip(records, encoded, strict=True):
            _check_length(record, cfg, len(tokens), tokenizer.context)
        return [
            (text, np.array(tokens, dtype=np.int32))
            for text, tokens in zip(texts, encoded, strict=True)
        ]

    def notes(self) -> list[str]:
        """Return sentences on what the template does to the prompts so far."""
        return self._reader.notes()


def check_prompts(
    records: Sequence[DataRecord], cfg: PromptFormat, tokenizer: Tokenizer | None
) -> None:
    """Refuse prompts that `PromptEncoder` would refuse, as far as a quick check can tell.

    It checks the form of every prompt. It counts the tokens of the first prompts only, and of none
    if they need a chat template or there is no tokenizer.
    Raises: DataError, ConfigError.
    """
    if tokenizer is not None:
        require_template(cfg, tokenizer)
    for record in records:
        if chat_of(record, cfg) is None:
            record.text(cfg.prompt_key)
    num_characters = 0
    for record in records[:CHECKED_PROMPTS]:
        if tokenizer is None or cfg.chat_template:
            return
        prompt = record.text(cfg.prompt_key)
        num_characters += len(prompt)
        if num_characters > CHECKED_CHARACTERS:
            return
        _check_length(record, cfg, tokenizer.num_tokens(prompt), tokenizer.context)


def is_too_long(cfg: PromptFormat, num_tokens: int, context: int) -> bool:
    """Whether a prompt is left out: it is over the limit, or leaves no room for an answer."""
    leaves_no_room = cfg.too_long != "refuse" and num_tokens >= context
    return leaves_no_room or 0 < cfg.max_prompt_tokens < num_tokens


def defects(cfg: PromptFormat, of_prompt: str, *others: str) -> str:
    """Return what is wrong with records that are left out: `of_prompt` if there is a limit."""
    limited = [of_prompt] if cfg.max_prompt_tokens else []
    long = ["do not fit the model's context"] if cfg.too_long != "refuse" else []
    return " or ".join([*limited, *long, *others])


def _check_length(record: DataRecord, cfg: PromptFormat, num_tokens: int, context: int) -> None:
    where = f"{record.where}: {cfg.prompt_key}"
    if not num_tokens:
        raise DataError(where, "the prompt is empty")
    if num_tokens >= context and not is_too_long(cfg, num_tokens, context):
        raise DataError(
            where,
            f"the prompt has {num_tokens} tokens, but the model's context of {context} must hold "
            "the response too: set prompts.max_prompt_tokens to drop long prompts",
        )

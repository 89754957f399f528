"""Form of prompts in a data file: how they are rendered, tokenised and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spmd_rl.config.rules import at_least
from spmd_rl.data.files.files import DataRecord
from spmd_rl.data.render.chat import ChatFormat, chat_of, render
from spmd_rl.data.render.chat_reader import ChatReader, require_template
from spmd_rl.data.render.tokenizer import Tokenizer, beginning, begun_once
from spmd_rl.errors import DataError

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

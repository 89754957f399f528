"""Prompts from the records of a data file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.files.record import DataRecord, short
from spmd_rl.data.files.record_store import Preparer
from spmd_rl.data.render.chat import chat_of
from spmd_rl.data.render.prompt_format import PromptEncoder, PromptFormat, defects, is_too_long
from spmd_rl.data.render.tokenizer import Tokenizer
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.rewards.names import canonical_name
from spmd_rl.types.prompts import Prompt

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class PromptConfig(PromptFormat):
    answer_key: str = "answer"  # the answer to grade by, or to learn; "" if there is none
    # the reward functions of a record's own: a name, or a table of names and weights; "": none
    reward_key: str = ""

    @property
    def answer_keys(self) -> tuple[str, ...]:
        return (self.answer_key,) if self.answer_key else ()


def graded(prompts: PromptFormat | None) -> PromptConfig | None:
    """Return the settings of prompts whose samples graders see; None for those of other data."""
    return prompts if isinstance(prompts, PromptConfig) else None


class PromptPreparer(Preparer[Prompt]):
    """Makes a prompt of each record, with -1 as its uid, but for prompts that are too long."""

    noun = "prompts"

    def __init__(self, cfg: PromptConfig, tokenizer: Tokenizer) -> None:
        if cfg.too_long == "cut":
            raise ConfigError("prompts.too_long = 'cut' is for answers to learn: drop long prompts")
        self.defect = defects(cfg, f"have more than {cfg.max_prompt_tokens} tokens")
        self.answer_keys, self._context = cfg.answer_keys, tokenizer.context
        self._cfg, self._encoder = cfg, PromptEncoder(cfg, tokenizer)

    def make(self, records: Sequence[DataRecord], source: str) -> list[Prompt | None]:
        """Return a prompt for each record; None for one that is too long. Raises: DataError."""
        encoded = self._encoder.encode(records)
        return [
            self._prompt(record, text, tokens, source)
            for record, (text, tokens) in zip(records, encoded, strict=True)
        ]

    def encoded(self, prepared: Prompt) -> bytes:
        """Return tokens and all fields of a prompt: a corrected answer changes rewards."""
        fields = [prepared.text, prepared.answer, prepared.meta]
        texts = json.dumps(
            [*fields, prepared.reward] if prepared.reward else fields, sort_keys=True, default=repr
        ).encode()
        parts = prepared.tokens.tobytes(), texts
        return b"".join(len(part).to_bytes(8, "little") + part for part in parts)

    def notes(self) -> list[str]:
        """Return what the chat template does to prompts."""
        return self._encoder.notes()

    def report(self, records: Sequence[DataRecord], prepared: Sequence[Prompt]) -> list[str]:
        """Return how many answers are numbers, and how many prompts hold an answer already."""
        found = super().report(records, prepared)
        if num_answered := sum(map(_is_answered, prepared)):
            found.append(
                f"{num_answered} of {len(prepared)} prompts end with a message of the assistant. "
                "The model answers after it, so leave out what it should find itself."
            )
        return found

    def _prompt(
        self, record: DataRecord, text: str, tokens: NDArray[np.int32], source: str
    ) -> Prompt | None:
        cfg = self._cfg
        # each draw sets the uid
        prompt = graded_prompt(record, cfg, uid=-1).replace(
            tokens=tokens,
            text=text,
            source=source,
            reward=own_reward(record, cfg),
            chat=_chat(record, cfg),
        )
        return None if is_too_long(cfg, len(tokens), self._context) else prompt


def _is_answered(prompt: Prompt) -> bool:
    """Whether the assistant has the last word in a prompt."""
    messages = prompt.chat.get("messages", [])
    return bool(messages) and messages[-1]["role"] == "assistant"


def own_reward(record: DataRecord, cfg: PromptConfig) -> dict[str, float]:
    """Return the canonical names of the reward functions that the record names, with weights.

    It is empty for a record that names none, or null, or "".
    Raises: DataError for anything but a name or a table of names and finite weights.
    """
    value = record.get(cfg.reward_key) if cfg.reward_key else None
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        return {canonical_name(record.text(cfg.reward_key)): 1.0}
    if isinstance(value, dict):
        # a column of a table has all names in each row, with nulls
        weights = {name: weight for name, weight in value.items() if weight is not None}
        if all(type(one) in (int, float) and math.isfinite(one) for one in weights.values()):
            return {canonical_name(name): float(weight) for name, weight in weights.items()}
    raise DataError(
        f"{record.where}: {cfg.reward_key}",
        "expected the name of a reward function, or a table of names and finite weights, "
        f"got {short(value)}",
    )


def graded_prompt(record: DataRecord, cfg: PromptConfig, uid: int) -> Prompt:
    """Return what graders see of a record, without the tokens of its prompt.

    Raises: DataError for an answer that is missing, or a field that cannot be sent.
    """
    prompt = record.row.get(cfg.prompt_key)
    return Prompt(
        uid,
        np.zeros(0, np.int32),
        text=prompt if isinstance(prompt, str) else "",
        answer=record.text_or_number(cfg.answer_key) if cfg.answer_key else "",
        meta=_meta(record, cfg),
    )


def _chat(record: DataRecord, cfg: PromptConfig) -> dict[str, Any]:
    """Return what the chat template gets, as `Prompt.chat` has it.

    Raises: DataError as `_check_travels`.
    """
    chat = chat_of(record, cfg)
    if chat is None:
        return {}
    data = chat.as_data()
    _check_travels(chat.where, data)
    return data


def _meta(record: DataRecord, cfg: PromptConfig) -> dict[str, Any]:
    """Return the fields of a record that neither prompt nor answer are made of.

    Raises: DataError as `_check_travels`.
    """
    used = cfg.used_keys | {cfg.reward_key}
    meta = {key: value for key, value in record.row.items() if key not in used}
    for key, value in meta.items():
        _check_travels(f"{record.where}: {key}", [key, value])
    return meta


def _check_travels(where: str, value: Any) -> None:
    """Raises: DataError for a value that cannot be sent to another process."""
    try:
        _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        problem = f"this value cannot be sent to another process: {error}"
        raise DataError(where, problem) from error

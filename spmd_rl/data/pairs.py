"""Preference pairs: prompts with two answers, of which people or a judge chose one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.files import DataRecord, read_records
from spmd_rl.data.prompt_format import (
    PromptFormat,
    Tokenizer,
    encode_prompts,
    is_too_long,
    report_dropped,
    report_numeric_answers,
)
from spmd_rl.data.sft import encode_answers, join
from spmd_rl.data.sft_pair import SftPair
from spmd_rl.data.stream import RecordStream
from spmd_rl.errors import DataError


@dataclass(frozen=True, kw_only=True)
class PairConfig(PromptFormat):
    chosen_key: str = "chosen"  # the better answer: text, or a list with one assistant message
    rejected_key: str = "rejected"  # the worse answer, likewise

    @property
    def answer_keys(self) -> tuple[str, ...]:
        return self.chosen_key, self.rejected_key


class PreferencePair(NamedTuple):
    """The sequences of both answers to one prompt."""

    chosen: SftPair
    rejected: SftPair


class PreferencePairs(RecordStream[PreferencePair]):
    """An endless stream of preference pairs, with the same kinds of files and order as `Prompts`.

    `cfg.max_prompt_tokens` bounds the prompt alone. `num_dropped` counts the pairs it dropped.
    """

    def __init__(self, path: str, cfg: PairConfig, tokenizer: Tokenizer) -> None:
        records = read_records(path)
        pairs = _make_pairs(path, records, cfg, tokenizer)
        self.num_dropped = len(records) - len(pairs)
        report_dropped(path, cfg, self.num_dropped, len(records))
        super().__init__(path, "preference pairs", pairs, seed=cfg.seed, shuffle=cfg.shuffle)

    def next(self, num_pairs: int) -> list[PreferencePair]:
        """Return the next pairs, across the end of an epoch if need be."""
        return self.draw(num_pairs)

    def _arrays(self, record: PreferencePair) -> tuple[NDArray[np.generic], ...]:
        chosen, rejected = record
        return (*chosen, *rejected)


def answer_text(record: DataRecord, key: str) -> str:
    """Return the answer under `key`: a text, a number as text, or what an assistant says.

    Raises: DataError for anything else, and for a list of several messages.
    """
    value = record.value(key)
    if not isinstance(value, list):
        return record.text_or_number(key)
    where = f"{record.where}: {key}"
    if len(value) != 1 or not _is_assistant_message(value[0]):
        raise DataError(
            where, "expected a text, or a list with one message whose role is 'assistant'"
        )
    return DataRecord(where, value[0]).text("content")


def _is_assistant_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _make_pairs(
    path: str, records: list[DataRecord], cfg: PairConfig, tokenizer: Tokenizer
) -> list[PreferencePair]:
    """Return the pairs of the records, without those whose prompt is too long."""
    prompts = [tokens for _, tokens in encode_prompts(records, cfg, tokenizer)]
    answers = {}
    for key in cfg.answer_keys:
        report_numeric_answers(path, key, records)
        texts = [answer_text(record, key) for record in records]
        answers[key] = encode_answers(texts, tokenizer)
    return [
        PreferencePair(
            join(record, prompt, answers[cfg.chosen_key][number], tokenizer),
            join(record, prompt, answers[cfg.rejected_key][number], tokenizer),
        )
        for number, (record, prompt) in enumerate(zip(records, prompts, strict=True))
        if not is_too_long(cfg, len(prompt))
    ]

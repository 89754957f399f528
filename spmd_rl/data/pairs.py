"""Preference pairs: prompts with two answers, of which people or a judge chose one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmd_rl.data.files import DataRecord
from spmd_rl.data.preparer import Preparer
from spmd_rl.data.prompt_format import (
    PromptFormat,
    Tokenizer,
    encode_prompts,
    is_too_long,
    report_numeric_answers,
)
from spmd_rl.data.sft import encode_answers, join, learned_eos
from spmd_rl.data.stream import RecordStream
from spmd_rl.errors import DataError
from spmd_rl.types.sft_pair import SftPair


@dataclass(frozen=True, kw_only=True)
class PairConfig(PromptFormat):
    # the better answer: text, or a list of messages whose last is the assistant's answer
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"  # the worse answer, likewise

    @property
    def answer_keys(self) -> tuple[str, ...]:
        return self.chosen_key, self.rejected_key


class PreferencePair(NamedTuple):
    """The sequences of both answers to one prompt."""

    chosen: SftPair
    rejected: SftPair


class PreferencePairs(RecordStream[PreferencePair]):
    """An endless stream of preference pairs, from the same files and in the order of `Prompts`.

    `cfg.max_prompt_tokens` bounds the prompt alone.
    Raises: as `RecordStream`.
    """

    def __init__(
        self, data: str | Mapping[str, float], cfg: PairConfig, tokenizer: Tokenizer
    ) -> None:
        super().__init__(data, PairPreparer(cfg, tokenizer), seed=cfg.seed, shuffle=cfg.shuffle)

    def next(self, num_pairs: int) -> list[PreferencePair]:
        """Return the next pairs, across the end of an epoch if need be."""
        return self.draw(num_pairs)


class PairPreparer(Preparer[PreferencePair]):
    """Makes a preference pair of each record, but for prompts that are too long.

    Raises: ConfigError for a tokenizer without end-of-text token.
    """

    noun = "preference pairs"

    def __init__(self, cfg: PairConfig, tokenizer: Tokenizer) -> None:
        self.defect = f"have a prompt of more than {cfg.max_prompt_tokens} tokens"
        self._cfg, self._tokenizer = cfg, tokenizer
        self._eos = learned_eos(tokenizer)

    def make(self, records: Sequence[DataRecord], source: str) -> list[PreferencePair | None]:
        """Return the pair of each record; None where the prompt is too long. Raises: DataError."""
        cfg, tokenizer = self._cfg, self._tokenizer
        prompts = [tokens for _, tokens in encode_prompts(records, cfg, tokenizer)]
        chosen, rejected = (
            encode_answers(
                [answer_text(one, key, cfg.prompt_key) for one in records], tokenizer, self._eos
            )
            for key in (cfg.chosen_key, cfg.rejected_key)
        )
        return [
            None
            if is_too_long(cfg, len(prompt))
            else PreferencePair(*(join(record, prompt, one, tokenizer, source) for one in answers))
            for record, prompt, *answers in zip(records, prompts, chosen, rejected, strict=True)
        ]

    def encoded(self, prepared: PreferencePair) -> bytes:
        """Return tokens and masks of both answers."""
        return b"".join(sequence.encoded() for sequence in prepared)

    def report(
        self, path: str, records: Sequence[DataRecord], prepared: Sequence[PreferencePair]
    ) -> None:
        """Print how many answers are numbers."""
        for key in self._cfg.answer_keys:
            report_numeric_answers(path, key, records)


def answer_text(record: DataRecord, key: str, prompt_key: str) -> str:
    """Return the answer under `key`: a text, a number as text, or what an assistant says.

    Before the message of the assistant, the messages of the prompt may stand again.
    Raises: DataError for anything else.
    """
    value = record.value(key)
    if not isinstance(value, list):
        return record.text_or_number(key)
    where = f"{record.where}: {key}"
    if not value or not _is_assistant_message(value[-1]):
        raise DataError(where, "expected a text, or messages of which an assistant's is the last")
    if value[-1].get("tool_calls"):
        raise DataError(where, "an answer of a preference pair cannot call tools")
    if len(value) > 1 and _messages(value[:-1]) != _messages(record.value(prompt_key)):
        raise DataError(
            where, f"the messages before the answer are not those of the prompt, {prompt_key!r}"
        )
    return DataRecord(where, value[-1]).text("content")


def _messages(prompt: Any) -> list[Any]:
    """Return a prompt as messages without nulls: a text is one of the user."""
    if not isinstance(prompt, list):
        return [{"role": "user", "content": prompt}]
    return [
        {key: value for key, value in message.items() if value is not None}
        if isinstance(message, dict)
        else message
        for message in prompt
    ]


def _is_assistant_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"

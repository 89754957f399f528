"""Preference pairs: prompts with two answers, of which people or a judge chose one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.answer_end import assistant
from spmd_rl.data.chat import chat_of, render
from spmd_rl.data.files import DataRecord
from spmd_rl.data.preparer import Preparer
from spmd_rl.data.prompt_format import (
    PromptFormat,
    Tokenizer,
    encode_prompts,
    is_too_long,
    report_numeric_answers,
)
from spmd_rl.data.sft import encode_answers, fitting, join, learned_eos
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

    `cfg.max_prompt_tokens` bounds the prompt alone. `for_reward_model`: where there is a chat
    template, a sequence is the whole text that it makes of prompt and answer, and its last token is
    learned. Else it is the prompt, and after it what an engine would draw.
    Raises: as `RecordStream`.
    """

    def __init__(
        self,
        data: str | Mapping[str, float],
        cfg: PairConfig,
        tokenizer: Tokenizer,
        *,
        for_reward_model: bool = False,
    ) -> None:
        preparer = pair_preparer(cfg, tokenizer, for_reward_model=for_reward_model)
        super().__init__(data, preparer, seed=cfg.seed, shuffle=cfg.shuffle)

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
        fit = [not is_too_long(cfg, len(prompt)) for prompt in prompts]
        chosen, rejected = (
            self._sequences(records, prompts, fit, key, source)
            for key in (cfg.chosen_key, cfg.rejected_key)
        )
        return [
            PreferencePair(better, worse) if better and worse else None
            for better, worse in zip(chosen, rejected, strict=True)
        ]

    def _sequences(
        self,
        records: Sequence[DataRecord],
        prompts: Sequence[NDArray[np.int32]],
        fit: Sequence[bool],
        key: str,
        source: str,
    ) -> list[SftPair | None]:
        """Return each prompt with the answer under `key`; None for a prompt that does not fit."""
        texts = [answer_text(record, key, self._cfg.prompt_key) for record in records]
        answers = encode_answers(texts, self._tokenizer, self._eos)
        return [
            join(record, prompt, answer, self._tokenizer, source) if fits else None
            for record, prompt, answer, fits in zip(records, prompts, answers, fit, strict=True)
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


class RewardPairPreparer(PairPreparer):
    """Makes pairs whose sequences are as the chat template renders them, to their very end."""

    def _sequences(
        self,
        records: Sequence[DataRecord],
        prompts: Sequence[NDArray[np.int32]],
        fit: Sequence[bool],
        key: str,
        source: str,
    ) -> list[SftPair | None]:
        texts = [self._text(record, key) for record in records]
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [
            self._sequence(record, tokens, source) if fits else None
            for record, tokens, fits in zip(records, encoded, fit, strict=True)
        ]

    def _text(self, record: DataRecord, key: str) -> str:
        chat = chat_of(record, self._cfg)
        assert chat is not None, "this preparer is for prompts with a chat template"
        answer = assistant(answer_text(record, key, self._cfg.prompt_key))
        answered = replace(chat, messages=[*chat.messages, answer])
        return render(answered, self._tokenizer, generation_prompt=False)

    def _sequence(self, record: DataRecord, tokens: list[int], source: str) -> SftPair:
        is_last = np.arange(len(tokens)) == len(tokens) - 1
        sequence = SftPair(np.array(tokens, np.int32), is_last, source)
        return fitting(record, sequence, self._tokenizer)


def pair_preparer(cfg: PairConfig, tokenizer: Tokenizer, *, for_reward_model: bool) -> PairPreparer:
    """Return what makes the pairs of `PreferencePairs`. Raises: as `PairPreparer`."""
    kind = RewardPairPreparer if for_reward_model and cfg.chat_template else PairPreparer
    return kind(cfg, tokenizer)


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

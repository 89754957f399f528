"""Preference pairs: prompts with two answers, of which people or a judge chose one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.files.record import DataRecord
from spmd_rl.data.message_fields import MARKS, plain_fields, says_something, weight_of
from spmd_rl.data.render.answer_end import assistant
from spmd_rl.data.render.chat import chat_of, render
from spmd_rl.data.render.messages import without, written_messages
from spmd_rl.data.render.prompt_format import PromptFormat
from spmd_rl.data.render.tokenizer import Tokenizer
from spmd_rl.data.sft import AnsweredPreparer
from spmd_rl.data.stream import RecordStream
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.types.sft_pair import SftPair

# fields of an answer's message: its text, and those that change nothing
_ANSWER_FIELDS = {"role", "content", "id", *MARKS}


@dataclass(frozen=True, kw_only=True)
class PairConfig(PromptFormat):
    # the better answer: text, or a list of messages whose last is the assistant's answer
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"  # the worse answer, likewise

    @property
    def answer_keys(self) -> tuple[str, ...]:
        return self.chosen_key, self.rejected_key

    def check_answer(self, record: DataRecord, key: str) -> None:
        answer_text(record, key, self.prompt_key)


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


class PairPreparer(AnsweredPreparer[PreferencePair]):
    """Makes a preference pair of each record, but for those of which nothing can be learned.

    These are pairs whose prompt is too long, or whose answers are equal.

    Raises: ConfigError for a tokenizer without end-of-text token.
    """

    noun = "preference pairs"

    def __init__(self, cfg: PairConfig, tokenizer: Tokenizer) -> None:
        super().__init__(cfg, tokenizer, "have two equal answers")

    def text(self, record: DataRecord, key: str) -> str:
        return answer_text(record, key, self.cfg.prompt_key)

    def make(self, records: Sequence[DataRecord], source: str) -> list[PreferencePair | None]:
        """Return the pair of each record; None where it is left out. Raises: DataError."""
        return [
            PreferencePair(better, worse)
            if better and worse and not np.array_equal(better.tokens, worse.tokens)
            else None
            for better, worse in zip(*self.sequences(records, source), strict=True)
        ]


class RewardPairPreparer(PairPreparer):
    """Makes pairs whose sequences are as the chat template renders them, to their very end."""

    def _of_key(
        self,
        records: Sequence[DataRecord],
        prompts: Sequence[NDArray[np.int32]],
        key: str,
        source: str,
    ) -> list[SftPair | None]:
        texts = [self._rendered(record, key) for record in records]
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [
            self._sequence(record, tokens, source) if self.takes(prompt) else None
            for record, prompt, tokens in zip(records, prompts, encoded, strict=True)
        ]

    def _rendered(self, record: DataRecord, key: str) -> str:
        chat = chat_of(record, self.cfg)
        assert chat is not None, "this preparer is for prompts with a chat template"
        answered = replace(chat, messages=[*chat.messages, assistant(self.text(record, key))])
        return render(answered, self.tokenizer, generation_prompt=False)

    def _sequence(self, record: DataRecord, tokens: list[int], source: str) -> SftPair | None:
        is_last = np.arange(len(tokens)) == len(tokens) - 1
        sequence = SftPair(np.array(tokens, np.int32), is_last, source)
        return self._fit.fitting(record, sequence)


def pair_preparer(cfg: PairConfig, tokenizer: Tokenizer, *, for_reward_model: bool) -> PairPreparer:
    """Return what makes the pairs of `PreferencePairs`. Raises: as `PairPreparer`."""
    if for_reward_model and cfg.too_long == "cut":
        raise ConfigError(
            "prompts.too_long = 'cut' would take away the end of an answer, where a reward model "
            "is read: drop such pairs"
        )
    kind = RewardPairPreparer if for_reward_model and cfg.chat_template else PairPreparer
    return kind(cfg, tokenizer)


def answer_text(record: DataRecord, key: str, prompt_key: str) -> str:
    """Return the answer under `key`: a text, a number as text, or what an assistant says.

    Before the message of the assistant, the messages of the prompt may stand again.
    Raises: DataError for anything else.
    """
    where = f"{record.where}: {key}"
    messages = written_messages(where, record.value(key))
    if messages is None:
        return record.text_or_number(key)
    *before, answer = messages or [None]
    if not isinstance(answer, dict) or answer.get("role") != "assistant":
        raise DataError(where, "expected a text, or messages of which an assistant's is the last")
    if answer.get("tool_calls"):
        raise DataError(where, "an answer of a preference pair cannot call tools")
    place = f"{where}[{len(before)}]"
    others = (name for name in answer if name not in _ANSWER_FIELDS)
    if name := next((one for one in others if says_something(answer[one])), None):
        raise DataError(place, f"nothing is learned of {name!r}")
    if weight_of(place, answer) == 0:
        marks = " and ".join(repr(name) for name in answer if name in MARKS)
        raise DataError(place, f"by {marks} this answer is not learned: leave the pair out")
    if before and _messages(where, before) != _messages(where, record.value(prompt_key)):
        raise DataError(
            where, f"the messages before the answer are not those of the prompt, {prompt_key!r}"
        )
    return DataRecord(where, answer).text("content")


def _messages(where: str, prompt: Any) -> list[Any]:
    """Return a prompt as messages without nulls and marks: a text is one of the user."""
    messages = written_messages(where, prompt)
    if messages is None:
        return [{"role": "user", "content": prompt}]
    return [
        without(plain_fields(where, message), ["weight"]) if isinstance(message, dict) else message
        for message in messages
    ]

"""Supervised data: prompts with answers, and conversations. Only answers' tokens are learned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.chat import Chat, chat_of, refuse_ignored
from spmd_rl.data.eos import eos_disagreement, eos_ids
from spmd_rl.data.files import DataRecord
from spmd_rl.data.preparer import Preparer
from spmd_rl.data.prompt_format import (
    Tokenizer,
    encode_prompts,
    is_too_long,
    report_numeric_answers,
    require_template,
)
from spmd_rl.data.prompt_records import PromptConfig
from spmd_rl.data.stream import RecordStream
from spmd_rl.data.turns import Learn, encode_turns, learned_turns
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.types.sft_pair import SftPair


class SftPairs(RecordStream[list[SftPair]]):
    """An endless stream of supervised data, from the same files and in the same order as `Prompts`.

    A record is a prompt with its answer. Without an `answer_key` it is a conversation, of which
    assistant messages are learned: `learn` says which. A conversation has several sequences where
    the chat template rewrites earlier turns. They are drawn together, and the constructor prints
    how many there are.

    `cfg.max_prompt_tokens` bounds the prompt alone, which is all before the last answer of a
    sequence.
    Raises: as `RecordStream`.
    """

    def __init__(
        self,
        data: str | Mapping[str, float],
        cfg: PromptConfig,
        tokenizer: Tokenizer,
        learn: Learn = "all",
    ) -> None:
        preparer = sft_preparer(cfg, tokenizer, learn)
        super().__init__(data, preparer, seed=cfg.seed, shuffle=cfg.shuffle)

    def next(self, num_records: int) -> list[SftPair]:
        """Return the sequences of the next records, across the end of an epoch if need be."""
        return [*chain.from_iterable(self.draw(num_records))]


def sft_preparer(cfg: PromptConfig, tokenizer: Tokenizer, learn: Learn) -> SftPreparer:
    """Return what makes sequences of prompts with answers, or without an answer of conversations.

    Raises: ConfigError for a tokenizer without end-of-text token, or without a template that the
    conversations need.
    """
    if cfg.answer_key:
        return AnswerPreparer(cfg, tokenizer)
    return ConversationPreparer(cfg, tokenizer, learn)


class SftPreparer(Preparer[list[SftPair]]):
    """Makes the sequences that are learned of each record."""

    def __init__(self, cfg: PromptConfig, tokenizer: Tokenizer) -> None:
        self.cfg, self.tokenizer = cfg, tokenizer
        self.eos = learned_eos(tokenizer)

    def encoded(self, prepared: list[SftPair]) -> bytes:
        """Return tokens and masks."""
        return b"".join(sequence.encoded() for sequence in prepared)


class AnswerPreparer(SftPreparer):
    """Makes one sequence of each prompt with its answer."""

    noun = "pairs"

    def __init__(self, cfg: PromptConfig, tokenizer: Tokenizer) -> None:
        super().__init__(cfg, tokenizer)
        self.defect = f"have a prompt of more than {cfg.max_prompt_tokens} tokens"

    def make(self, records: Sequence[DataRecord], source: str) -> list[list[SftPair] | None]:
        """Return the sequence of each record; None where the prompt is too long."""
        cfg = self.cfg
        prompts = [tokens for _, tokens in encode_prompts(records, cfg, self.tokenizer)]
        texts = [record.text_or_number(cfg.answer_key) for record in records]
        answers = encode_answers(texts, self.tokenizer, self.eos)
        return [
            None
            if is_too_long(cfg, len(prompt))
            else [join(record, prompt, answer, self.tokenizer, source)]
            for record, prompt, answer in zip(records, prompts, answers, strict=True)
        ]

    def report(
        self, path: str, records: Sequence[DataRecord], prepared: Sequence[list[SftPair]]
    ) -> None:
        """Print how many answers are numbers."""
        report_numeric_answers(path, self.cfg.answer_key, records)


class ConversationPreparer(SftPreparer):
    """Makes the sequences of each conversation, most often one."""

    noun = "conversations"

    def __init__(self, cfg: PromptConfig, tokenizer: Tokenizer, learn: Learn) -> None:
        super().__init__(cfg, tokenizer)
        self.defect = f"have more than {cfg.max_prompt_tokens} tokens before an answer"
        self._learn: Learn = learn

    def make(self, records: Sequence[DataRecord], source: str) -> list[list[SftPair] | None]:
        """Return the sequences of each conversation; None where a prompt is too long."""
        chats = [conversation(record, self.cfg) for record in records]
        require_template(self.tokenizer)
        refuse_ignored(chats, self.tokenizer)
        encoded = encode_turns(chats, self._learn, self.tokenizer, self.eos)
        return [
            self._fitting(record, [sequence._replace(source=source) for sequence in sequences])
            for record, sequences in zip(records, encoded, strict=True)
        ]

    def report(
        self, path: str, records: Sequence[DataRecord], prepared: Sequence[list[SftPair]]
    ) -> None:
        """Print how many conversations have several sequences, and how many sequences they have."""
        split = [len(sequences) for sequences in prepared if len(sequences) > 1]
        if split:
            print(split_note(path, len(split), len(prepared), sum(split)), flush=True)

    def _fitting(self, record: DataRecord, sequences: list[SftPair]) -> list[SftPair] | None:
        if any(is_too_long(self.cfg, sequence.num_prompt_tokens) for sequence in sequences):
            return None
        return [fitting(record, sequence, self.tokenizer) for sequence in sequences]


def split_note(path: str, num_split: int, num_conversations: int, num_sequences: int) -> str:
    """Return how many conversations are learned in several sequences, and in how many together."""
    return (
        f"{path}: the chat template repeats an earlier answer otherwise than the model gives it. "
        f"So {num_split} of {num_conversations} conversations become {num_sequences} sequences."
    )


def check_sft(records: Iterable[DataRecord], cfg: PromptConfig, learn: Learn) -> None:
    """Refuse records without an answer or a turn to learn, as far as that needs no tokenizer.

    Raises: DataError, ConfigError.
    """
    for record in records:
        if cfg.answer_key:
            if not record.has(cfg.answer_key) and (key := _conversation_key(record, cfg)):
                raise DataError(
                    f"{record.where}: {cfg.answer_key}",
                    f"no such key in this record: to learn the assistant messages of {key!r} give "
                    f"--prompts.chat_template=true --prompts.prompt_key={key} "
                    "--prompts.answer_key=",
                )
            record.text_or_number(cfg.answer_key)
        else:
            learned_turns(conversation(record, cfg), learn)


def _conversation_key(record: DataRecord, cfg: PromptConfig) -> str:
    """Return the key of messages of which an assistant's are the last, or "" without any."""
    for key in (cfg.prompt_key, "messages"):
        messages = record.get(key)
        last = messages[-1] if isinstance(messages, list) and messages else None
        if isinstance(last, dict) and last.get("role") == "assistant":
            return key
    return ""


def conversation(record: DataRecord, cfg: PromptConfig) -> Chat:
    """Return the chat of a record. Raises: DataError, ConfigError without a chat template."""
    chat = chat_of(record, cfg)
    if chat is None:
        raise ConfigError(
            "supervised pairs need an answer_key: set it to the key of the answers, or set "
            "prompts.chat_template = true to learn the assistant messages of conversations"
        )
    return chat


def learned_eos(tokenizer: Tokenizer) -> int:
    """Return the token that learned texts end with. Raises: ConfigError when there is none."""
    eos = next(iter(eos_ids(tokenizer)), None)
    if eos is None:
        raise ConfigError(
            "this model's tokenizer has no end-of-text token, so an answer could not end"
        )
    if sentence := eos_disagreement(tokenizer):
        print(f"{sentence}: answers are learned with {eos} as their last token", flush=True)
    return eos


def encode_answers(texts: Sequence[str], tokenizer: Tokenizer, eos: int) -> list[list[int]]:
    """Return the tokens of answers, each with the end-of-text token at its end."""
    encoded: list[list[int]] = tokenizer([*texts], add_special_tokens=False)["input_ids"]
    return [[*tokens, eos] for tokens in encoded]


def join(
    record: DataRecord,
    prompt: NDArray[np.int32],
    answer: list[int],
    tokenizer: Tokenizer,
    source: str,
) -> SftPair:
    """Return prompt and answer as one sequence.

    Raises: DataError when it is longer than the model's context.
    """
    tokens = np.concatenate([prompt, np.array(answer, dtype=np.int32)])
    return fitting(
        record, SftPair(tokens, np.arange(len(tokens)) >= len(prompt), source), tokenizer
    )


def fitting(record: DataRecord, sequence: SftPair, tokenizer: Tokenizer) -> SftPair:
    """Return the sequence. Raises: DataError when it is longer than the model's context."""
    if len(sequence.tokens) > tokenizer.context:
        raise DataError(
            record.where,
            f"prompt and answer have {len(sequence.tokens)} tokens, but the model's context is "
            f"{tokenizer.context}",
        )
    return sequence

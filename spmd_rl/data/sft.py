"""Supervised data: prompts with answers, and conversations. Only answers' tokens are learned."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.files.record import DataRecord
from spmd_rl.data.files.record_store import Preparer
from spmd_rl.data.prompt_records import PromptConfig
from spmd_rl.data.render.chat import Chat, chat_of
from spmd_rl.data.render.eos import eos_disagreement, eos_ids
from spmd_rl.data.render.messages import written_messages
from spmd_rl.data.render.prompt_format import (
    ChatReader,
    PromptEncoder,
    PromptFormat,
    defects,
    is_too_long,
)
from spmd_rl.data.render.tokenizer import Tokenizer
from spmd_rl.data.render.turns import Learn, encode_turns, ends_early, is_empty, learned_turns
from spmd_rl.data.stream import RecordStream
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.types.sft_pair import SftPair

S = TypeVar("S", bound=Iterable[SftPair])


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


def sft_preparer(cfg: PromptConfig, tokenizer: Tokenizer, learn: Learn) -> Preparer[list[SftPair]]:
    """Return what makes sequences of prompts with answers, or without an answer of conversations.

    Raises: ConfigError for a tokenizer without end-of-text token, or without a template that the
    conversations need.
    """
    if cfg.answer_key:
        return AnswerPreparer(cfg, tokenizer)
    return ConversationPreparer(cfg, tokenizer, learn)


class SequencePreparer(Preparer[S]):
    """Makes the sequences that are learned of each record."""

    def __init__(self, cfg: PromptFormat, tokenizer: Tokenizer) -> None:
        self.cfg, self.tokenizer, self.answer_keys = cfg, tokenizer, cfg.answer_keys
        self._fit = ContextFit(cfg, tokenizer)

    def encoded(self, prepared: S) -> bytes:
        """Return tokens and masks."""
        return b"".join(sequence.encoded() for sequence in prepared)


class AnsweredPreparer(SequencePreparer[S]):
    """Makes a sequence of each answer of a record, with its prompt before it."""

    def __init__(self, cfg: PromptFormat, tokenizer: Tokenizer, *more_defects: str) -> None:
        super().__init__(cfg, tokenizer)
        self._prompts, self._answers = PromptEncoder(cfg, tokenizer), AnswerEncoder(tokenizer)
        limit = f"have a prompt of more than {cfg.max_prompt_tokens} tokens"
        self.defect = defects(cfg, limit, *more_defects)

    @abstractmethod
    def text(self, record: DataRecord, key: str) -> str:
        """Return the answer under `key`. Raises: DataError."""

    def sequences(self, records: Sequence[DataRecord], source: str) -> list[list[SftPair | None]]:
        """Return the sequences of each key of answers; None for one that is left out."""
        prompts = [tokens for _, tokens in self._prompts.encode(records)]
        return [self._of_key(records, prompts, key, source) for key in self.answer_keys]

    def _of_key(
        self,
        records: Sequence[DataRecord],
        prompts: Sequence[NDArray[np.int32]],
        key: str,
        source: str,
    ) -> list[SftPair | None]:
        texts = [self.text(record, key) for record in records]
        answers = self._answers.encode(records, key, texts)
        return [
            self._fit.join(record, prompt, answer, source) if self.takes(prompt) else None
            for record, prompt, answer in zip(records, prompts, answers, strict=True)
        ]

    def takes(self, prompt: NDArray[np.int32]) -> bool:
        """Whether a prompt of this length is learned."""
        return not is_too_long(self.cfg, len(prompt), self.tokenizer.context)

    def notes(self) -> list[str]:
        """Return what the chat template does to prompts, and how many answers are empty."""
        return self._prompts.notes() + self._answers.notes() + self._fit.notes()


class AnswerPreparer(AnsweredPreparer[list[SftPair]]):
    """Makes one sequence of each prompt with its answer."""

    noun = "pairs"

    def text(self, record: DataRecord, key: str) -> str:
        return _answer_text(record, key)

    def make(self, records: Sequence[DataRecord], source: str) -> list[list[SftPair] | None]:
        """Return the sequence of each record; None where it is left out."""
        (sequences,) = self.sequences(records, source)
        return [[sequence] if sequence else None for sequence in sequences]


class ConversationPreparer(SequencePreparer[list[SftPair]]):
    """Makes the sequences of each conversation, most often one."""

    noun = "conversations"

    def __init__(self, cfg: PromptConfig, tokenizer: Tokenizer, learn: Learn) -> None:
        super().__init__(cfg, tokenizer)
        limit = f"have more than {cfg.max_prompt_tokens} tokens before an answer"
        self.defect = defects(cfg, limit)
        self._learn: Learn = learn
        self._reader, self._eos = ChatReader(cfg, tokenizer), learned_eos(tokenizer)
        self._num_turns, self._num_empty = 0, 0

    def make(self, records: Sequence[DataRecord], source: str) -> list[list[SftPair] | None]:
        """Return the sequences of each conversation; None where a prompt is too long."""
        chats = [_required(chat) for chat in self._reader.read(records)]
        encoded = encode_turns(chats, self._learn, self.tokenizer, self._eos)
        turns = [chat.messages[n] for chat in chats for n in learned_turns(chat, self._learn)]
        self._num_turns += len(turns)
        self._num_empty += sum(map(is_empty, turns))
        return [
            self._fitting(record, [sequence._replace(source=source) for sequence in sequences])
            for record, sequences in zip(records, encoded, strict=True)
        ]

    def notes(self) -> list[str]:
        """Return what the chat template does to prompts, and how many turns are empty."""
        empty = _of_empty("assistant messages", self._num_empty, self._num_turns)
        return self._reader.notes() + empty + self._fit.notes()

    def report(self, records: Sequence[DataRecord], prepared: Sequence[list[SftPair]]) -> list[str]:
        """Return how many conversations have several sequences, and how many these are."""
        split = [len(sequences) for sequences in prepared if len(sequences) > 1]
        return [split_note(len(split), len(prepared), sum(split))] if split else []

    def _fitting(self, record: DataRecord, sequences: list[SftPair]) -> list[SftPair] | None:
        limit = self.cfg.max_prompt_tokens
        if any(0 < limit < sequence.num_prompt_tokens for sequence in sequences):
            return None
        fitting = [self._fit.fitting(record, sequence) for sequence in sequences]
        if self.cfg.too_long == "drop" and None in fitting:
            return None
        return [*filter(None, fitting)] or None


def split_note(num_split: int, num_conversations: int, num_sequences: int) -> str:
    """Return how many conversations are learned in several sequences, and in how many together."""
    return (
        "the chat template repeats an earlier answer otherwise than the model gives it. "
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
            _answer_text(record, cfg.answer_key)
        else:
            learned_turns(conversation(record, cfg), learn)


def _conversation_key(record: DataRecord, cfg: PromptConfig) -> str:
    """Return the key of messages of which an assistant's are the last, or "" without any."""
    for key in (cfg.prompt_key, "messages"):
        messages = written_messages(f"{record.where}: {key}", record.get(key))
        last = messages[-1] if messages else None
        if isinstance(last, dict) and last.get("role") == "assistant":
            return key
    return ""


def conversation(record: DataRecord, cfg: PromptConfig) -> Chat:
    """Return the chat of a record. Raises: DataError, ConfigError without a chat template."""
    return _required(chat_of(record, cfg))


def _required(chat: Chat | None) -> Chat:
    """Return the chat of a conversation. Raises: ConfigError without a chat template."""
    if chat is None:
        raise ConfigError(
            "supervised pairs need an answer_key: set it to the key of the answers, or set "
            "prompts.chat_template = true to learn the assistant messages of conversations"
        )
    return chat


def _answer_text(record: DataRecord, key: str) -> str:
    """Return the answer under `key`. Raises: DataError for messages, as a list or as JSON text."""
    where = f"{record.where}: {key}"
    messages = written_messages(where, record.value(key))
    if messages and all(isinstance(m, dict) and m.get("role") == "assistant" for m in messages):
        raise DataError(
            where,
            "the answer of a prompt is a text, and these are messages: write their content, or "
            "join them to those of the prompt and give --prompts.answer_key=",
        )
    return record.text_or_number(key)


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


class AnswerEncoder:
    """Makes tokens of answers, each with the end-of-text token at its end.

    Raises: ConfigError for a tokenizer without one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._eos = tokenizer, learned_eos(tokenizer)
        self._ends = {self._eos, *eos_ids(tokenizer)}
        self._num_answers, self._num_empty = 0, 0

    def encode(
        self, records: Sequence[DataRecord], key: str, texts: Sequence[str]
    ) -> list[list[int]]:
        """Return the tokens of the texts, which the records have under `key`.

        Raises: DataError for a text that holds an end-of-text token.
        """
        encoded: list[list[int]] = self._tokenizer([*texts], add_special_tokens=False)["input_ids"]
        for record, tokens in zip(records, encoded, strict=True):
            if found := self._ends.intersection(tokens):
                end = self._tokenizer.decode([min(found)])
                raise DataError(f"{record.where}: {key}", ends_early(end))
        self._num_answers += len(texts)
        self._num_empty += texts.count("")
        return [[*tokens, self._eos] for tokens in encoded]

    def notes(self) -> list[str]:
        """Return how many answers are empty, if any is."""
        return _of_empty("answers", self._num_empty, self._num_answers)


def _of_empty(noun: str, num_empty: int, num_all: int) -> list[str]:
    if not num_empty:
        return []
    return [f"{num_empty} of {num_all} {noun} are empty: the model learns to end at once there"]


class ContextFit:
    """Keeps sequences within the model's context, as `prompts.too_long` says."""

    def __init__(self, cfg: PromptFormat, tokenizer: Tokenizer) -> None:
        self._too_long, self._context = cfg.too_long, tokenizer.context
        self._num_cut, self._num_all = 0, 0

    def join(
        self, record: DataRecord, prompt: NDArray[np.int32], answer: list[int], source: str
    ) -> SftPair | None:
        """Return prompt and answer as one sequence; None and errors as `fitting`."""
        tokens = np.concatenate([prompt, np.array(answer, dtype=np.int32)])
        return self.fitting(record, SftPair(tokens, np.arange(len(tokens)) >= len(prompt), source))

    def fitting(self, record: DataRecord, sequence: SftPair) -> SftPair | None:
        """Return the sequence, or what the context holds of it; None where it is left out.

        Raises: DataError when it is too long, unless the settings say otherwise.
        """
        context, size = self._context, len(sequence.tokens)
        self._num_all += 1
        if size <= context:
            return sequence
        if self._too_long == "refuse":
            raise DataError(
                record.where,
                f"prompt and answer have {size} tokens, but the model's context is {context}: set "
                'prompts.too_long to "drop" to leave such records out, or to "cut" to learn what '
                "fits",
            )
        if self._too_long == "drop" or not sequence.mask[:context].any():
            return None
        self._num_cut += 1
        return sequence._replace(tokens=sequence.tokens[:context], mask=sequence.mask[:context])

    def notes(self) -> list[str]:
        """Return how many sequences were cut, if any was."""
        if not self._num_cut:
            return []
        cut = f"{self._num_cut} of {self._num_all} sequences are cut at the model's context"
        return [f"{cut} of {self._context} tokens: no end is learned there"]

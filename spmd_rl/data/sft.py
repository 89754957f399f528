"""Supervised data: prompts with answers, and conversations. Only answers' tokens are learned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.chat import Chat, chat_of, refuse_ignored
from spmd_rl.data.eos import eos_disagreement, eos_ids
from spmd_rl.data.files import DataRecord, read_records
from spmd_rl.data.prompt_format import (
    Tokenizer,
    encode_prompts,
    is_too_long,
    report_dropped,
    report_numeric_answers,
    require_template,
)
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.data.sft_pair import SftPair
from spmd_rl.data.stream import RecordStream
from spmd_rl.data.turns import Learn, encode_turns, learned_turns
from spmd_rl.errors import ConfigError, DataError


class SftPairs(RecordStream[list[SftPair]]):
    """An endless stream of supervised data, with the same files, keys and order as `Prompts`.

    A record is a prompt with its answer. Without an `answer_key` it is a conversation, of which
    assistant messages are learned: `learn` says which. A conversation has several sequences where
    the chat template rewrites earlier turns. They are drawn together, and the constructor prints
    how many there are.

    `cfg.max_prompt_tokens` bounds the prompt alone, which is all before the last answer of a
    sequence. `num_dropped` counts the records it dropped.
    """

    def __init__(
        self, path: str, cfg: PromptConfig, tokenizer: Tokenizer, learn: Learn = "all"
    ) -> None:
        records = read_records(path)
        if cfg.answer_key:
            kept = _make_pairs(path, records, cfg, tokenizer)
        else:
            kept = _make_conversations(path, records, cfg, tokenizer, learn)
        self.num_dropped = len(records) - len(kept)
        report_dropped(path, cfg, self.num_dropped, len(records))
        super().__init__(path, "pairs", kept, seed=cfg.seed, shuffle=cfg.shuffle)

    def next(self, num_records: int) -> list[SftPair]:
        """Return the sequences of the next records, across the end of an epoch if need be."""
        return [*chain.from_iterable(self.draw(num_records))]

    def _arrays(self, record: list[SftPair]) -> Iterable[NDArray[np.generic]]:
        return chain.from_iterable(record)


def check_sft(records: Iterable[DataRecord], cfg: PromptConfig, learn: Learn) -> None:
    """Refuse records without an answer or a turn to learn, as far as that needs no tokenizer.

    Raises: DataError, ConfigError.
    """
    for record in records:
        if cfg.answer_key:
            if cfg.answer_key not in record.row and _is_conversation(record, cfg):
                raise DataError(
                    f"{record.where}: {cfg.answer_key}",
                    "no such key in this record: --prompts.answer_key= learns the assistant "
                    f"messages of {cfg.prompt_key!r}",
                )
            record.text_or_number(cfg.answer_key)
        else:
            learned_turns(_conversation(record, cfg), learn)


def _make_pairs(
    path: str, records: list[DataRecord], cfg: PromptConfig, tokenizer: Tokenizer
) -> list[list[SftPair]]:
    """Return the pairs of the records, without those whose prompt is too long."""
    prompts = [tokens for _, tokens in encode_prompts(records, cfg, tokenizer)]
    report_numeric_answers(path, cfg.answer_key, records)
    texts = [record.text_or_number(cfg.answer_key) for record in records]
    answers = encode_answers(texts, tokenizer)
    return [
        [join(record, prompt, answer, tokenizer)]
        for record, prompt, answer in zip(records, prompts, answers, strict=True)
        if not is_too_long(cfg, len(prompt))
    ]


def _make_conversations(
    path: str, records: list[DataRecord], cfg: PromptConfig, tokenizer: Tokenizer, learn: Learn
) -> list[list[SftPair]]:
    """Return the sequences of each conversation, without those of which a prompt is too long."""
    chats = [_conversation(record, cfg) for record in records]
    require_template(tokenizer)
    eos = learned_eos(tokenizer)
    refuse_ignored(chats, tokenizer)
    kept = []
    encoded = encode_turns(chats, learn, tokenizer, eos)
    for record, sequences in zip(records, encoded, strict=True):
        if not any(is_too_long(cfg, sequence.num_prompt_tokens) for sequence in sequences):
            kept.append([_fitting(record, sequence, tokenizer) for sequence in sequences])
    _report_split(path, kept)
    return kept


def _is_conversation(record: DataRecord, cfg: PromptConfig) -> bool:
    """Whether an assistant has the last word in a record's prompt."""
    prompt = record.row.get(cfg.prompt_key)
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _conversation(record: DataRecord, cfg: PromptConfig) -> Chat:
    chat = chat_of(record, cfg)
    if chat is None:
        raise ConfigError(
            "supervised pairs need an answer_key: set it to the key of the answers, or set "
            "prompts.chat_template = true to learn the assistant messages of conversations"
        )
    return chat


def _report_split(path: str, conversations: Sequence[Sequence[SftPair]]) -> None:
    """Print how many conversations have several sequences, and how many sequences there are."""
    num_split = sum(len(sequences) > 1 for sequences in conversations)
    if num_split:
        print(
            f"{path}: {num_split} of {len(conversations)} conversations are learned in several "
            f"sequences, {sum(map(len, conversations))} of all conversations, because the chat "
            "template does not repeat an earlier answer as the model gives it",
            flush=True,
        )


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


def encode_answers(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of answers, each with an end-of-text token at its end."""
    eos = learned_eos(tokenizer)
    encoded: list[list[int]] = tokenizer([*texts], add_special_tokens=False)["input_ids"]
    return [[*tokens, eos] for tokens in encoded]


def join(
    record: DataRecord, prompt: NDArray[np.int32], answer: list[int], tokenizer: Tokenizer
) -> SftPair:
    """Return prompt and answer as one sequence.

    Raises: DataError when it is longer than the model's context.
    """
    tokens = np.concatenate([prompt, np.array(answer, dtype=np.int32)])
    pair = SftPair(tokens, np.arange(len(tokens)) >= len(prompt))
    return _fitting(record, pair, tokenizer)


def _fitting(record: DataRecord, sequence: SftPair, tokenizer: Tokenizer) -> SftPair:
    """Return the sequence. Raises: DataError when it is longer than the model's context."""
    if len(sequence.tokens) > tokenizer.context:
        raise DataError(
            record.where,
            f"prompt and answer have {len(sequence.tokens)} tokens, but the model's context is "
            f"{tokenizer.context}",
        )
    return sequence

"""Supervised pairs: prompts with answers, of which only the answers' tokens are learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.eos import eos_disagreement, eos_ids
from spmd_rl.data.files import DataRecord, read_records
from spmd_rl.data.prompts import (
    PromptConfig,
    Tokenizer,
    encode_prompts,
    is_too_long,
    report_dropped,
    report_numeric_answers,
)
from spmd_rl.data.stream import RecordStream
from spmd_rl.errors import ConfigError, DataError


class SftPair(NamedTuple):
    """One sequence to imitate. `mask` is true on the answer and its end-of-text token.

    Shape: both are [T].
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]


class SftPairs(RecordStream[SftPair]):
    """An endless stream of prompt-answer pairs, with the same files, keys and order as `Prompts`.

    `cfg.max_prompt_tokens` bounds the prompt alone. `num_dropped` counts the pairs it dropped.
    """

    def __init__(self, path: str, cfg: PromptConfig, tokenizer: Tokenizer) -> None:
        if not cfg.answer_key:
            raise ConfigError(
                "supervised pairs need an answer_key: set it to the key of the answers"
            )
        records = read_records(path)
        pairs = _make_pairs(path, records, cfg, tokenizer)
        self.num_dropped = len(records) - len(pairs)
        report_dropped(path, cfg, self.num_dropped, len(records))
        super().__init__(path, "pairs", pairs, seed=cfg.seed, shuffle=cfg.shuffle)

    def _arrays(self, record: SftPair) -> SftPair:
        return record


def _make_pairs(
    path: str, records: list[DataRecord], cfg: PromptConfig, tokenizer: Tokenizer
) -> list[SftPair]:
    """Return the pairs of the records, without those whose prompt is too long."""
    prompts = [tokens for _, tokens in encode_prompts(records, cfg, tokenizer)]
    report_numeric_answers(path, cfg.answer_key, records)
    texts = [record.text_or_number(cfg.answer_key) for record in records]
    answers = encode_answers(texts, tokenizer)
    return [
        join(record, prompt, answer, tokenizer)
        for record, prompt, answer in zip(records, prompts, answers, strict=True)
        if not is_too_long(cfg, len(prompt))
    ]


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
    if len(tokens) > tokenizer.context:
        raise DataError(
            str(record.where),
            f"prompt and answer have {len(tokens)} tokens, but the model's context is "
            f"{tokenizer.context}",
        )
    return SftPair(tokens, np.arange(len(tokens)) >= len(prompt))

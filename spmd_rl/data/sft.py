"""Supervised pairs: prompts with answers, of which only the answers' tokens are learned."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.eos import eos_disagreement, eos_ids
from spmd_rl.data.epoch_order import EpochOrder
from spmd_rl.data.files import DataRecord, read_records
from spmd_rl.data.prompts import (
    DATA_CHANGED,
    PromptConfig,
    Tokenizer,
    encode_prompts,
    is_too_long,
    report_dropped,
    report_numeric_answers,
)
from spmd_rl.errors import ConfigError, DataError


class SftPair(NamedTuple):
    """One sequence to imitate. `mask` is true on the answer and its end-of-text token.

    Shape: both are [T].
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]


class SftPairs:
    """An endless stream of prompt-answer pairs, with the same files, keys and order as `Prompts`.

    `cfg.max_prompt_tokens` bounds the prompt alone. `num_dropped` counts the pairs it dropped.
    """

    def __init__(self, path: str, cfg: PromptConfig, tokenizer: Tokenizer) -> None:
        if not cfg.answer_key:
            raise ConfigError(
                "supervised pairs need an answer_key: set it to the key of the answers"
            )
        records = read_records(path)
        self._pairs = _make_pairs(path, records, cfg, tokenizer)
        self.num_dropped = len(records) - len(self._pairs)
        report_dropped(path, cfg, self.num_dropped, len(records))
        self._source = path
        self._order = EpochOrder(len(self._pairs), seed=cfg.seed, shuffle=cfg.shuffle)

    def __len__(self) -> int:
        return len(self._pairs)

    def next(self, num_pairs: int) -> list[SftPair]:
        """Return the next pairs, across the end of an epoch if need be."""
        return [self._pairs[self._order.next()] for _ in range(num_pairs)]

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain data."""
        return {"drawn": self._order.num_drawn, "digest": self._digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the draw at which `state` was taken.

        Raises: DataError when the data is not the same.
        """
        if state.get("digest") != self._digest:
            raise DataError(self._source, f"the pairs are {DATA_CHANGED}")
        self._order.num_drawn = state["drawn"]

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for pair in self._pairs:
            for array in pair:
                digest.update(array.size.to_bytes(8, "little") + array.tobytes())
        return digest.hexdigest()


def _make_pairs(
    path: str, records: list[DataRecord], cfg: PromptConfig, tokenizer: Tokenizer
) -> list[SftPair]:
    """Return the pairs of the records, without those whose prompt is too long."""
    prompts = [tokens for _, tokens in encode_prompts(records, cfg, tokenizer)]
    answers = _encode_answers(path, records, cfg, tokenizer)
    return [
        _join(record, prompt, answer, tokenizer)
        for record, prompt, answer in zip(records, prompts, answers, strict=True)
        if not is_too_long(cfg, len(prompt))
    ]


def _encode_answers(
    path: str, records: list[DataRecord], cfg: PromptConfig, tokenizer: Tokenizer
) -> list[list[int]]:
    eos = next(iter(eos_ids(tokenizer)), None)
    if eos is None:
        raise ConfigError(
            "this model's tokenizer has no end-of-text token, so an answer could not end"
        )
    if sentence := eos_disagreement(tokenizer):
        print(f"{sentence}: answers are learned with {eos} as their last token", flush=True)
    report_numeric_answers(path, cfg, records)
    texts = [record.text_or_number(cfg.answer_key) for record in records]
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [[*tokens, eos] for tokens in encoded]


def _join(
    record: DataRecord, prompt: NDArray[np.int32], answer: list[int], tokenizer: Tokenizer
) -> SftPair:
    tokens = np.concatenate([prompt, np.array(answer, dtype=np.int32)])
    if len(tokens) > tokenizer.context:
        raise DataError(
            str(record.where),
            f"prompt and answer have {len(tokens)} tokens, but the model's context is "
            f"{tokenizer.context}",
        )
    return SftPair(tokens, np.arange(len(tokens)) >= len(prompt))

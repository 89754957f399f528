"""Prompt and answer pairs for supervised training: the answer's tokens are learned, the prompt's
only read.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.eos import differ, end_ids
from spmd_rl.data.epoch_order import EpochOrder
from spmd_rl.data.files import Record, read_records
from spmd_rl.data.prompts import (
    OTHERS,
    PromptConfig,
    Tokenizer,
    encode_prompts,
    is_dropped,
    tell_dropped,
    tell_numbers,
)
from spmd_rl.errors import ConfigError, DataError


class Pair(NamedTuple):
    """One sequence to imitate. Shape: both are [T]; `mask` is true on the answer and the
    end-of-text token.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]


class Pairs:
    """An endless stream of pairs over the same files, keys and order as `Prompts`.

    `cfg.max_prompt_tokens` bounds the prompt alone. `num_dropped` counts what it dropped.
    """

    def __init__(self, path: str, cfg: PromptConfig, tokenizer: Tokenizer) -> None:
        if not cfg.answer_key:
            raise ConfigError("supervised pairs need an answer_key")
        records = read_records(path)
        prompts = [tokens for _, tokens in encode_prompts(records, cfg, tokenizer)]
        answers = _encode_answers(path, records, cfg, tokenizer)
        self._pairs = [
            _join(record, prompt, answer, tokenizer)
            for record, prompt, answer in zip(records, prompts, answers, strict=True)
            if not is_dropped(cfg, len(prompt))
        ]
        if not self._pairs:
            raise DataError(
                path,
                f"all {len(records)} prompts are longer than {cfg.max_prompt_tokens} tokens",
            )
        self.num_dropped = len(records) - len(self._pairs)
        tell_dropped(path, cfg, self.num_dropped, len(records))
        self._source = path
        self._order = EpochOrder(len(self._pairs), seed=cfg.seed, shuffle=cfg.shuffle)

    def __len__(self) -> int:
        return len(self._pairs)

    def next(self, num_pairs: int) -> list[Pair]:
        """The next draws; an epoch may end in the middle."""
        return [self._pairs[self._order.next()] for _ in range(num_pairs)]

    def state(self) -> dict[str, Any]:
        """All that `restore` needs, as plain data."""
        return {"drawn": self._order.drawn, "digest": self._digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises: DataError when it was taken over other data."""
        if state.get("digest") != self._digest:
            raise DataError(self._source, f"the pairs are {OTHERS}")
        self._order.drawn = state["drawn"]

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for pair in self._pairs:
            for array in pair:
                digest.update(array.size.to_bytes(8, "little") + array.tobytes())
        return digest.hexdigest()


def _encode_answers(
    path: str, records: list[Record], cfg: PromptConfig, tokenizer: Tokenizer
) -> list[list[int]]:
    if not (ends := end_ids(tokenizer)):
        raise ConfigError(
            "this model's tokenizer has no end-of-text token, so an answer could not end"
        )
    if sentence := differ(tokenizer):
        print(f"{sentence}: answers are learned with {ends[0]} at their end", flush=True)
    tell_numbers(path, cfg, records)
    texts = [record.text_or_number(cfg.answer_key) for record in records]
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [[*tokens, ends[0]] for tokens in encoded]


def _join(
    record: Record, prompt: NDArray[np.int32], answer: list[int], tokenizer: Tokenizer
) -> Pair:
    tokens = np.concatenate([prompt, np.array(answer, dtype=np.int32)])
    if len(tokens) > tokenizer.context:
        room = f"the model's context is {tokenizer.context}"
        raise DataError(
            str(record.where), f"prompt and answer have {len(tokens)} tokens, and {room}"
        )
    return Pair(tokens, np.arange(len(tokens)) >= len(prompt))

"""Prompts for rollouts, tokenised once and drawn in a repeatable order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import msgspec

from spmd_rl.data.chat import chat_of
from spmd_rl.data.eos import StopConditions, sampling_warnings
from spmd_rl.data.epoch_order import EpochOrder
from spmd_rl.data.files import DataRecord, read_records
from spmd_rl.data.prompt_format import (
    PromptFormat,
    Tokenizer,
    encode_prompts,
    is_too_long,
    report_dropped,
    report_numeric_answers,
)
from spmd_rl.data.source import DataSource
from spmd_rl.data.stream import DATA_CHANGED
from spmd_rl.errors import DataError, SpmdError
from spmd_rl.types.prompts import Prompt

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class PromptConfig(PromptFormat):
    answer_key: str = "answer"  # the reference answer, for the reward function; "" if there is none

    @property
    def answer_keys(self) -> tuple[str, ...]:
        return (self.answer_key,) if self.answer_key else ()


class Prompts(DataSource):
    """An endless stream of prompts from a .jsonl or .parquet file, or a slice `path@[start:stop]`.

    `len()` is the number of prompts of an epoch; `num_dropped` counts those that were too long.
    With `sampling`, the constructor prints what would cut samples: no end-of-text token, or a
    short context.
    Raises: DataError (file, line, field) or ConfigError in the constructor, never later.
    """

    def __init__(
        self,
        path: str,
        cfg: PromptConfig,
        tokenizer: Tokenizer,
        sampling: StopConditions | None = None,
    ) -> None:
        records = read_records(path)
        prompts = _make_prompts(records, cfg, tokenizer)
        fits = [not is_too_long(cfg, len(prompt.tokens)) for prompt in prompts]
        kept = [*compress(prompts, fits)]
        self.num_dropped = len(records) - len(kept)
        report_dropped(path, cfg, self.num_dropped, len(records))
        report_numeric_answers(path, cfg.answer_key, records)
        if sampling is not None:
            _print_sampling_warnings(path, kept, tokenizer, sampling)
        self._path = path
        self._prompts = kept
        self._order = EpochOrder(len(kept), seed=cfg.seed, shuffle=cfg.shuffle)
        self._given_back: list[int] = []  # uids, in order

    def __len__(self) -> int:
        return len(self._prompts)

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts, across the end of an epoch if need be.

        Those that were given back come first, in the order of their uids.
        """
        again, self._given_back = self._given_back[:num_prompts], self._given_back[num_prompts:]
        first = self._order.num_drawn
        self._order.num_drawn += num_prompts - len(again)
        return [*map(self._drawn, [*again, *range(first, self._order.num_drawn)])]

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Have these prompts taken again, under the uids that they have.

        Raises: SpmdError for a prompt that is not out.
        """
        uids = sorted(self._given_back + [prompt.uid for prompt in prompts])
        for uid, following in pairwise([*uids, self._order.num_drawn]):
            if not 0 <= uid < following:
                raise SpmdError(f"prompt {uid} is given back, but it is not out")
        self._given_back = uids

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain data.

        That is the draws so far, the uids that were given back, and a digest of the data.
        """
        return {
            "drawn": self._order.num_drawn,
            "given_back": self._given_back,
            "digest": self._digest,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the draw at which `state` was taken.

        Raises: DataError when the data is not the same.
        """
        if state["digest"] != self._digest:
            raise DataError(self._path, f"the prompts are {DATA_CHANGED}")
        self._order.num_drawn, self._given_back = state["drawn"], list(state.get("given_back", ()))

    def _drawn(self, uid: int) -> Prompt:
        prompt = self._prompts[self._order.index_of(uid)]
        return prompt.replace(uid=uid, meta=prompt.meta.copy())

    @cached_property
    def _digest(self) -> str:
        """Digest of all fields of the prompts: a corrected answer, for one, changes rewards."""
        digest = hashlib.sha256()
        for prompt in self._prompts:
            texts = json.dumps(
                [prompt.text, prompt.answer, prompt.meta], sort_keys=True, default=repr
            ).encode()
            for part in (prompt.tokens.tobytes(), texts):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()


def _make_prompts(
    records: Sequence[DataRecord], cfg: PromptConfig, tokenizer: Tokenizer
) -> list[Prompt]:
    encoded = encode_prompts(records, cfg, tokenizer)
    source = Path(records[0].where.rpartition(":")[0]).stem
    return [
        Prompt(
            uid=-1,  # set by each draw
            tokens=tokens,
            text=text,
            answer=record.text_or_number(cfg.answer_key) if cfg.answer_key else "",
            source=source,
            meta=_meta(record, cfg),
            chat=_chat(record, cfg),
        )
        for record, (text, tokens) in zip(records, encoded, strict=True)
    ]


def _print_sampling_warnings(
    path: str, prompts: Sequence[Prompt], tokenizer: Tokenizer, sampling: StopConditions
) -> None:
    lengths = [len(prompt.tokens) for prompt in prompts]
    for line in sampling_warnings(tokenizer, sampling, tokenizer.context, lengths, path):
        print(line, flush=True)


def _chat(record: DataRecord, cfg: PromptConfig) -> dict[str, Any]:
    """Return what the chat template gets, as `Prompt.chat` has it.

    Raises: DataError as `_check_travels`.
    """
    chat = chat_of(record, cfg)
    if chat is None:
        return {}
    data = chat.as_data()
    _check_travels(chat.where, data)
    return data


def _meta(record: DataRecord, cfg: PromptConfig) -> dict[str, Any]:
    """Return the fields of a record that neither prompt nor answer are made of.

    Raises: DataError as `_check_travels`.
    """
    meta = {key: value for key, value in record.row.items() if key not in cfg.used_keys}
    for key, value in meta.items():
        _check_travels(f"{record.where}: {key}", [key, value])
    return meta


def _check_travels(where: str, value: Any) -> None:
    """Raises: DataError for a value that cannot be sent to another process."""
    try:
        _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        problem = f"this value cannot be sent to another process: {error}"
        raise DataError(where, problem) from error

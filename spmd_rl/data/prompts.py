"""Prompts for rollouts, tokenised once and drawn in a repeatable order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.config.rules import at_least
from spmd_rl.data.eos import Limits, odd_samples
from spmd_rl.data.epoch_order import EpochOrder
from spmd_rl.data.files import Record, read_records
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.types.samples import Prompt

OTHERS = "not those the saved position was taken in: bring back the file as it was, or start another run with --run.name"

# whose tokens are counted before a run starts: some 0.1 s
CHECKED_PROMPTS, CHECKED_CHARACTERS = 1000, 1 << 18

_encode = msgspec.msgpack.Encoder().encode


class Tokenizer(Protocol):
    """What this room needs of a transformers tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def model_ends(self) -> tuple[int, ...]: ...  # the config's ids of the same

    @property
    def chat_template(self) -> str | None: ...

    @property
    def context(self) -> int: ...  # the model's positions

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


class LightTokenizer(Protocol):
    """What a look at prompts before the run needs of a tokenizer."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def context(self) -> int: ...  # the model's positions

    def num_tokens(self, text: str) -> int: ...  # special ones too


@dataclass(frozen=True)
class PromptConfig:
    prompt_key: str = "prompt"  # text, or a list of chat messages
    answer_key: str = "answer"  # what the reward function compares with; "" when there is none
    chat_template: bool = False  # wrap in the tokenizer's template, with the generation prompt
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # passed to the template
    max_prompt_tokens: int = 0  # longer prompts are dropped and counted; 0 keeps all
    shuffle: bool = True  # a new order every epoch; false: that of the file
    seed: int = 0  # of the orders

    def __post_init__(self) -> None:
        at_least(self, {"max_prompt_tokens": 0})


class Prompts:
    """An endless stream of the prompts in a .jsonl or .parquet file, or a slice `path@[start:stop]`.

    `len()` is one epoch, `num_dropped` how many were too long.

    Given how they are sampled, it prints what would cut the samples: no end-of-text token, or a
    short context.
    Raises: DataError (file, line, field) or ConfigError while it is built, never later.
    """

    def __init__(
        self,
        path: str,
        cfg: PromptConfig,
        tokenizer: Tokenizer,
        sampling: Limits | None = None,
    ) -> None:
        records = read_records(path)
        encoded = encode_prompts(records, cfg, tokenizer)
        hidden, source = (
            {cfg.prompt_key, cfg.answer_key},
            Path(records[0].where.rpartition(":")[0]).stem,
        )
        kept = [
            Prompt(
                uid=-1,  # of no draw yet
                tokens=tokens,
                text=text,
                answer=record.text_or_number(cfg.answer_key) if cfg.answer_key else "",
                source=source,
                meta=_meta(record, hidden),
            )
            for record, (text, tokens) in zip(records, encoded, strict=True)
            if not is_dropped(cfg, len(tokens))
        ]
        if not kept:
            raise DataError(
                path,
                f"all {len(records)} prompts are longer than {cfg.max_prompt_tokens} tokens",
            )
        self.num_dropped = len(records) - len(kept)
        tell_dropped(path, cfg, self.num_dropped, len(records))
        tell_numbers(path, cfg, records)
        if sampling is not None:
            lengths = [len(prompt.tokens) for prompt in kept]
            for line in odd_samples(tokenizer, sampling, tokenizer.context, lengths, path):
                print(line, flush=True)
        self._path = path
        self._entries = kept
        self._order = EpochOrder(len(kept), seed=cfg.seed, shuffle=cfg.shuffle)

    def __len__(self) -> int:
        return len(self._entries)

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next draws; an epoch may end in the middle."""
        return [self._draw() for _ in range(num_prompts)]

    def state(self) -> dict[str, Any]:
        """All that `restore` needs, as plain data: where the stream stands and which data it is
        over.
        """
        return {"drawn": self._order.drawn, "digest": self._digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises: DataError when it was taken over other data."""
        if state["digest"] != self._digest:
            raise DataError(self._path, f"the prompts are {OTHERS}")
        self._order.drawn = state["drawn"]

    def _draw(self) -> Prompt:
        uid = self._order.drawn
        entry = self._entries[self._order.next()]
        return entry.changed(uid=uid, meta=entry.meta.copy())

    @cached_property
    def _digest(self) -> str:
        """Of all that a draw gives: an answer that was mended is another reward."""
        digest = hashlib.sha256()
        for entry in self._entries:
            rest = json.dumps(
                [entry.text, entry.answer, entry.meta], sort_keys=True, default=repr
            ).encode()
            for part in (entry.tokens.tobytes(), rest):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()


def _meta(record: Record, hidden: set[str]) -> dict[str, Any]:
    """What a record holds beside `hidden`. Raises: DataError for a value that could not go to
    another process.
    """
    meta = {key: value for key, value in record.row.items() if key not in hidden}
    for item in meta.items():
        try:
            _encode(item)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            where = f"{record.where}: {item[0]}"
            raise DataError(where, f"this value cannot go to another process: {error}") from error
    return meta


def encode_prompts(
    records: Sequence[Record], cfg: PromptConfig, tokenizer: Tokenizer
) -> list[tuple[str, NDArray[np.int32]]]:
    """Text and tokens of every record's prompt, as the model is to see it."""
    if cfg.chat_template:
        _require_template(tokenizer)
    texts = [_render(prompt_of(record, cfg), cfg, tokenizer) for record in records]
    # a template writes its own special tokens: the tokenizer must not add a second BOS
    encoded = tokenizer(texts, add_special_tokens=not cfg.chat_template)["input_ids"]
    for record, tokens in zip(records, encoded, strict=True):
        _check_length(record, cfg, len(tokens), tokenizer.context)
    return [
        (text, np.array(tokens, dtype=np.int32))
        for text, tokens in zip(texts, encoded, strict=True)
    ]


def check_prompts(
    records: Sequence[Record], cfg: PromptConfig, tokenizer: LightTokenizer | None
) -> None:
    """Refuse prompts that `encode_prompts` would refuse, as far as a short look tells; needs no
    transformers.

    The form of every prompt is looked at. Tokens are counted of the first ones, where they need no
    chat template and the tokenizer is at hand. Raises: DataError, ConfigError.
    """
    if cfg.chat_template and tokenizer is not None:
        _require_template(tokenizer)
    prompts = [prompt_of(record, cfg) for record in records]
    num_characters = 0
    for record, prompt in zip(records[:CHECKED_PROMPTS], prompts, strict=False):
        num_characters += len(prompt)
        if tokenizer is None or cfg.chat_template or num_characters > CHECKED_CHARACTERS:
            return
        _check_length(record, cfg, tokenizer.num_tokens(str(prompt)), tokenizer.context)


def is_dropped(cfg: PromptConfig, num_tokens: int) -> bool:
    return 0 < cfg.max_prompt_tokens < num_tokens


def tell_dropped(path: str, cfg: PromptConfig, num_dropped: int, num_records: int) -> None:
    if num_dropped:
        limit = cfg.max_prompt_tokens
        print(
            f"{path}: {num_dropped} of {num_records} prompts have more than {limit} tokens: dropped",
            flush=True,
        )


def tell_numbers(path: str, cfg: PromptConfig, records: Sequence[Record]) -> None:
    numbers = [record for record in records if record.has_number(cfg.answer_key)]
    if numbers:
        shown = f"such as {numbers[0].text_or_number(cfg.answer_key)!r}"
        of_all = f"{len(numbers)} of {len(records)} answers"
        print(f"{path}: {of_all} are numbers, and their text is used, {shown}", flush=True)


def _require_template(tokenizer: Tokenizer | LightTokenizer) -> None:
    if not tokenizer.chat_template:
        raise ConfigError("chat_template is on, but this model's tokenizer has no chat template")


def _check_length(record: Record, cfg: PromptConfig, num_tokens: int, context: int) -> None:
    where = f"{record.where}: {cfg.prompt_key}"
    if not num_tokens:
        raise DataError(where, "the prompt is empty")
    if num_tokens >= context and not is_dropped(cfg, num_tokens):
        room = f"the model's context of {context} tokens is for its answer too"
        raise DataError(
            where,
            f"has {num_tokens} tokens, and {room}: prompts.max_prompt_tokens drops longer ones",
        )


def prompt_of(record: Record, cfg: PromptConfig) -> str | list[dict[str, Any]]:
    """The text or the chat messages of a record's prompt. Raises: DataError when it is neither."""
    messages = record.value(cfg.prompt_key)
    if not isinstance(messages, list):
        return record.text(cfg.prompt_key)
    where = f"{record.where}: {cfg.prompt_key}"
    if not cfg.chat_template:
        raise DataError(where, "a list of messages needs chat_template = true")
    if not messages or not all(
        isinstance(m, dict) and "role" in m and "content" in m for m in messages
    ):
        raise DataError(where, "expected messages, each with 'role' and 'content'")
    for content in (message["content"] for message in messages):
        if isinstance(content, (int, float)):
            raise DataError(
                where, f"expected a string as the content of a message, got {content!r}"
            )
    return messages


def _render(prompt: str | list[dict[str, Any]], cfg: PromptConfig, tokenizer: Tokenizer) -> str:
    if isinstance(prompt, str):
        if not cfg.chat_template:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    text: str = tokenizer.apply_chat_template(
        prompt, tokenize=False, add_generation_prompt=True, **cfg.template_kwargs
    )
    return text

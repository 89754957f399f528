"""Prompts for rollouts, tokenised once and drawn in a repeatable order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.config.rules import at_least
from spmd_rl.data.eos import EosIds, StopConditions, sampling_warnings
from spmd_rl.data.epoch_order import EpochOrder
from spmd_rl.data.files import DataRecord, read_records
from spmd_rl.data.stream import DATA_CHANGED
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.types.prompts import Prompt

# limits of `check_prompts`, which then takes about 0.1 s
CHECKED_PROMPTS, CHECKED_CHARACTERS = 1000, 1 << 18

_encode = msgspec.msgpack.Encoder().encode


class Tokenizer(EosIds, Protocol):
    """Tokenizer of a model, with the interface of transformers."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def context(self) -> int: ...  # how many tokens the model can take

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


class LightTokenizer(Protocol):
    """Tokenizer for `check_prompts`, which must not import transformers."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def context(self) -> int: ...  # how many tokens the model can take

    def num_tokens(self, text: str) -> int: ...  # including special tokens


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """Settings by which prompts are read, whatever else stands in a record."""

    prompt_key: str = "prompt"  # text, or a list of chat messages
    chat_template: bool = False  # apply the tokenizer's chat template, with the generation prompt
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # arguments for the chat template
    max_prompt_tokens: int = 0  # longer prompts are dropped; 0 keeps all
    shuffle: bool = True  # use a new order every epoch; false: the order of the file
    seed: int = 0  # of the shuffling

    def __post_init__(self) -> None:
        at_least(self, {"max_prompt_tokens": 0})

    @property
    def answer_keys(self) -> tuple[str, ...]:
        """The keys of the answers that each record must have."""
        return ()


@dataclass(frozen=True, kw_only=True)
class PromptConfig(PromptFormat):
    answer_key: str = "answer"  # the reference answer, for the reward function; "" if there is none

    @property
    def answer_keys(self) -> tuple[str, ...]:
        return (self.answer_key,) if self.answer_key else ()


class Prompts:
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
        self._written = [prompt_of(record, cfg) for record in compress(records, fits)]
        self._order = EpochOrder(len(kept), seed=cfg.seed, shuffle=cfg.shuffle)

    def __len__(self) -> int:
        return len(self._prompts)

    def next(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts, across the end of an epoch if need be."""
        return [self._draw() for _ in range(num_prompts)]

    def as_written(self, prompt: Prompt) -> str | list[dict[str, Any]]:
        """Return a drawn prompt as it stands in the file: a text or chat messages."""
        return self._written[self._order.index_of(prompt.uid)]

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain data: the draws so far and a digest of the data."""
        return {"drawn": self._order.num_drawn, "digest": self._digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the draw at which `state` was taken.

        Raises: DataError when the data is not the same.
        """
        if state["digest"] != self._digest:
            raise DataError(self._path, f"the prompts are {DATA_CHANGED}")
        self._order.num_drawn = state["drawn"]

    def _draw(self) -> Prompt:
        uid = self._order.num_drawn
        prompt = self._prompts[self._order.next()]
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
        )
        for record, (text, tokens) in zip(records, encoded, strict=True)
    ]


def _print_sampling_warnings(
    path: str, prompts: Sequence[Prompt], tokenizer: Tokenizer, sampling: StopConditions
) -> None:
    lengths = [len(prompt.tokens) for prompt in prompts]
    for line in sampling_warnings(tokenizer, sampling, tokenizer.context, lengths, path):
        print(line, flush=True)


def _meta(record: DataRecord, cfg: PromptConfig) -> dict[str, Any]:
    """Return the fields of a record besides prompt and answer.

    Raises: DataError for a value that cannot be sent to another process.
    """
    used = {cfg.prompt_key, cfg.answer_key}
    meta = {key: value for key, value in record.row.items() if key not in used}
    for item in meta.items():
        try:
            _encode(item)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            where = f"{record.where}: {item[0]}"
            problem = f"this value cannot be sent to another process: {error}"
            raise DataError(where, problem) from error
    return meta


def encode_prompts(
    records: Sequence[DataRecord], cfg: PromptFormat, tokenizer: Tokenizer
) -> list[tuple[str, NDArray[np.int32]]]:
    """Return text and tokens of every record's prompt, as the model sees them."""
    if cfg.chat_template:
        _require_template(tokenizer)
    texts = [_render(prompt_of(record, cfg), cfg, tokenizer) for record in records]
    # a chat template writes its own special tokens: the tokenizer must not add a second BOS
    encoded = tokenizer(texts, add_special_tokens=not cfg.chat_template)["input_ids"]
    for record, tokens in zip(records, encoded, strict=True):
        _check_length(record, cfg, len(tokens), tokenizer.context)
    return [
        (text, np.array(tokens, dtype=np.int32))
        for text, tokens in zip(texts, encoded, strict=True)
    ]


def check_prompts(
    records: Sequence[DataRecord], cfg: PromptFormat, tokenizer: LightTokenizer | None
) -> None:
    """Refuse prompts that `encode_prompts` would refuse, as far as a quick check can tell.

    It checks the form of every prompt. It counts the tokens of the first prompts only, and of none
    if they need a chat template or there is no tokenizer.
    Raises: DataError, ConfigError.
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


def is_too_long(cfg: PromptFormat, num_tokens: int) -> bool:
    return 0 < cfg.max_prompt_tokens < num_tokens


def report_dropped(path: str, cfg: PromptFormat, num_dropped: int, num_records: int) -> None:
    """Print how many prompts were too long. Raises: DataError when all were."""
    limit = cfg.max_prompt_tokens
    if num_dropped == num_records:
        raise DataError(path, f"all {num_records} prompts are longer than {limit} tokens")
    if num_dropped:
        print(
            f"{path}: dropped {num_dropped} of {num_records} prompts, "
            f"which have more than {limit} tokens",
            flush=True,
        )


def report_numeric_answers(path: str, key: str, records: Sequence[DataRecord]) -> None:
    numbers = [record for record in records if record.has_number(key)]
    if numbers:
        example = numbers[0].text_or_number(key)
        print(
            f"{path}: {len(numbers)} of {len(records)} answers are numbers: "
            f"they are used as text, such as {example!r}",
            flush=True,
        )


def _require_template(tokenizer: Tokenizer | LightTokenizer) -> None:
    if not tokenizer.chat_template:
        raise ConfigError("chat_template is true, but this model's tokenizer has no chat template")


def _check_length(record: DataRecord, cfg: PromptFormat, num_tokens: int, context: int) -> None:
    where = f"{record.where}: {cfg.prompt_key}"
    if not num_tokens:
        raise DataError(where, "the prompt is empty")
    if num_tokens >= context and not is_too_long(cfg, num_tokens):
        raise DataError(
            where,
            f"the prompt has {num_tokens} tokens, but the model's context of {context} must hold "
            "the response too: set prompts.max_prompt_tokens to drop long prompts",
        )


def prompt_of(record: DataRecord, cfg: PromptFormat) -> str | list[dict[str, Any]]:
    """Return the text or the chat messages of a record's prompt.

    Raises: DataError when it is neither.
    """
    messages = record.value(cfg.prompt_key)
    if not isinstance(messages, list):
        return record.text(cfg.prompt_key)
    where = f"{record.where}: {cfg.prompt_key}"
    if not cfg.chat_template:
        raise DataError(where, "a list of messages needs chat_template = true")
    _check_messages(where, messages)
    return messages


def _check_messages(where: str, messages: list[Any]) -> None:
    """Raises: DataError unless these are chat messages, and at least one."""
    if not messages or not all(
        isinstance(m, dict) and "role" in m and "content" in m for m in messages
    ):
        raise DataError(where, "expected messages, each with 'role' and 'content'")
    for content in (message["content"] for message in messages):
        if isinstance(content, (int, float)):
            raise DataError(
                where, f"expected a string as the content of a message, got {content!r}"
            )


def _render(prompt: str | list[dict[str, Any]], cfg: PromptFormat, tokenizer: Tokenizer) -> str:
    if isinstance(prompt, str):
        if not cfg.chat_template:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    text: str = tokenizer.apply_chat_template(
        prompt, tokenize=False, add_generation_prompt=True, **cfg.template_kwargs
    )
    return text

"""What a data file holds, and which of its records a run would refuse."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.data.chat import chat_of
from spmd_rl.data.logs.convert import read_rows
from spmd_rl.data.prompt_format import encode_prompts, is_too_long
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.data.record import DataRecord
from spmd_rl.errors import DataError
from spmd_rl.model.tokenizer import load_tokenizer

PERCENTILES = (0, 50, 90, 99, 100)
COUNTS = ("broken", "duplicate_prompts", "too_long")


def check_file(path: Path, cfg: PromptConfig, model: str | None) -> tuple[int, list[str]]:
    """Return the number of records, and a sentence for each one that a run would refuse."""
    tokenizer = load_tokenizer(model) if model else None
    problems: list[str] = []
    num_records = 0
    for record, error in _records(path):
        num_records += 1
        try:
            if error is not None:
                raise error
            if chat_of(record, cfg) is None:
                record.text(cfg.prompt_key)
            for key in cfg.answer_keys:
                record.text_or_number(key)
            if tokenizer is not None:
                encode_prompts([record], cfg, tokenizer)
        except DataError as problem:
            problems.append(str(problem))
    return num_records, problems


def _records(path: Path) -> Iterator[tuple[DataRecord, DataError | None]]:
    for number, row in read_rows(path):
        if isinstance(row, DataError):
            yield DataRecord(f"{path}:{number}", {}), row
        else:
            yield DataRecord(f"{path}:{number}", row), None


class _Tally:
    """Counts what the records of a file hold."""

    def __init__(self, cfg: PromptConfig, tokenizer: Any) -> None:
        self._cfg = cfg
        self._tokenizer = tokenizer
        self._counts: Counter[str] = Counter()
        self._fields: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._lengths: defaultdict[str, list[int]] = defaultdict(list)
        self._roles: Counter[str] = Counter()
        self._sources: Counter[str] = Counter()
        self._seen: set[bytes] = set()  # digests of prompts

    def add(self, record: DataRecord, is_broken: bool) -> None:
        self._counts["records"] += 1
        self._counts["broken"] += is_broken
        for key, value in record.row.items():
            self._fields[key][type(value).__name__] += 1
        if isinstance(source := record.row.get("source"), str):
            self._sources[source] += 1
        messages = _messages(record.row, self._cfg.prompt_key)
        self._roles.update(str(item.get("role")) for item in messages)
        if messages:
            self._lengths["turns"].append(len(messages))
        if prompt := record.row.get(self._cfg.prompt_key, messages):
            self._add_prompt(record, prompt)

    def _add_prompt(self, record: DataRecord, prompt: Any) -> None:
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
        self._counts["duplicate_prompts"] += digest in self._seen
        self._seen.add(digest)
        self._lengths["characters"].append(_num_characters(prompt))
        if self._tokenizer is None:
            return
        num_tokens = _num_tokens(record, self._cfg, self._tokenizer)
        if num_tokens is not None:
            self._lengths["tokens"].append(num_tokens)
            self._counts["too_long"] += is_too_long(self._cfg, num_tokens)

    def figures(self) -> dict[str, Any]:
        return {
            **{name: self._counts[name] for name in ("records", *COUNTS)},
            "fields": {key: dict(kinds) for key, kinds in self._fields.items()},
            "lengths": {name: _percentiles(values) for name, values in self._lengths.items()},
            "roles": dict(self._roles),
            "sources": dict(self._sources),
        }


def describe_file(path: Path, cfg: PromptConfig, model: str | None) -> dict[str, Any]:
    """Return figures of a file as plain data.

    Lengths are percentiles. A prompt that a run would refuse has no length in tokens.
    """
    tally = _Tally(cfg, load_tokenizer(model) if model else None)
    for record, error in _records(path):
        tally.add(record, error is not None)
    return tally.figures()


def _messages(row: dict[str, Any], prompt_key: str) -> list[dict[str, Any]]:
    given = row.get(prompt_key) if isinstance(row.get(prompt_key), list) else row.get("messages")
    return [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []


def _num_characters(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    items = prompt if isinstance(prompt, list) else []
    return sum(len(str(item.get("content") or "")) for item in items if isinstance(item, dict))


def _num_tokens(record: DataRecord, cfg: PromptConfig, tokenizer: Any) -> int | None:
    try:
        return len(encode_prompts([record], cfg, tokenizer)[0][1])
    except DataError:
        return None


def _percentiles(values: list[int]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def stats_lines(stats: dict[str, Any]) -> list[str]:
    """Return the figures of `describe_file` as lines for a terminal."""
    total = stats["records"]
    lines = [f"{'records':20}{total}"]
    lines += [
        f"{name.replace('_', ' '):20}{stats[name]} ({stats[name] / max(total, 1):.1%})"
        for name in COUNTS
    ]
    for key, kinds in stats["fields"].items():
        shown = ", ".join(f"{kind} {count / total:.1%}" for kind, count in kinds.items())
        lines.append(f"field {key!r:14}{shown}")
    for name, values in stats["lengths"].items():
        lines.append(f"{name:20}" + "  ".join(f"{p} {value:g}" for p, value in values.items()))
    for title in ("roles", "sources"):
        if stats[title]:
            shown = ", ".join(f"{name} {count}" for name, count in stats[title].items())
            lines.append(f"{title:20}{shown}")
    return lines

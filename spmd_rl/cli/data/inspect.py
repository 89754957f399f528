"""What a data file holds, and which of its records a run would refuse."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.data.files import DataRecord
from spmd_rl.data.logs.convert import read_rows
from spmd_rl.data.prompt_format import encode_prompts, is_too_long, prompt_of
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.errors import DataError
from spmd_rl.model.tokenizer import load_tokenizer

PERCENTILES = (0, 50, 90, 99, 100)


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
            prompt_of(record, cfg)
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


def describe_file(path: Path, cfg: PromptConfig, model: str | None) -> dict[str, Any]:
    """Return figures of a file as plain data. Prompts that a run would refuse have no length."""
    tokenizer = load_tokenizer(model) if model else None
    counts: Counter[str] = Counter()
    fields: defaultdict[str, Counter[str]] = defaultdict(Counter)
    lengths: defaultdict[str, list[int]] = defaultdict(list)
    roles: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    seen: set[bytes] = set()
    for record, error in _records(path):
        counts["records"] += 1
        counts["broken"] += error is not None
        for key, value in record.row.items():
            fields[key][type(value).__name__] += 1
        if isinstance(source := record.row.get("source"), str):
            sources[source] += 1
        messages = _messages(record.row, cfg.prompt_key)
        roles.update(str(item.get("role")) for item in messages)
        if messages:
            lengths["turns"].append(len(messages))
        prompt = record.row.get(cfg.prompt_key, messages)
        if not prompt:
            continue
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
        counts["duplicate_prompts"] += digest in seen
        seen.add(digest)
        lengths["characters"].append(_num_characters(prompt))
        if tokenizer is not None and (tokens := _num_tokens(record, cfg, tokenizer)) is not None:
            lengths["tokens"].append(tokens)
            counts["too_long"] += is_too_long(cfg, tokens)
    return {
        "records": counts["records"],
        "broken": counts["broken"],
        "duplicate_prompts": counts["duplicate_prompts"],
        "too_long": counts["too_long"],
        "fields": {key: dict(kinds) for key, kinds in fields.items()},
        "lengths": {name: _percentiles(values) for name, values in lengths.items()},
        "roles": dict(roles),
        "sources": dict(sources),
    }


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
        for name in ("broken", "duplicate_prompts", "too_long")
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

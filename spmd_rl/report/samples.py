"""The samples a page has room for: some steps, evenly spread, and of each some groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from spmd_rl.errors import DataError
from spmd_rl.observe.jsonl import numbered_lines, parse_finite_json
from spmd_rl.report.tokens import find_tokenizer, pieces

Sample = dict[str, Any]

TOKENS_BESIDES = 30  # as much as the rest of a sample takes of a page


class _Row(msgspec.Struct):
    """A line of the samples, as far as the page shows it; None stands for a number that is not
    finite.
    """

    prompt_uid: int | str | None = None
    index: int | None = None
    prompt: str = ""
    answer: str = ""
    text: str = ""
    reward: float | None = None
    finish: str = ""
    tokens: list[int] = []
    logprobs: list[float | None] = []
    versions: list[int] = []
    parts: dict[str, float | None] = {}


@dataclass(frozen=True)
class Room:
    """What of a run's samples goes on its page. A group is there whole or not at all.

    Units: `num_tokens` counts a sample as `TOKENS_BESIDES` more than it has.
    """

    num_steps: int = 40
    num_tokens: int = 160_000
    tokens_per_sample: int = 2_000


def read_samples(run: Path, config: dict[str, Any], room: Room) -> dict[str, Any]:
    """Steps with their groups, and how many of the run's steps they are."""
    files = {_step(path): path for path in (run / "samples").glob("step_*.jsonl")}
    tokenizer = find_tokenizer(run, config)
    chosen = spread(sorted(files), room.num_steps)
    steps, left = [], room.num_tokens
    for i in coarse_to_fine(len(chosen)):
        if left > 0:
            step = _read_step(
                files[chosen[i]], tokenizer, room, min(left, room.num_tokens // len(chosen))
            )
            left -= step.pop("num_tokens")
            steps.append({"step": chosen[i]} | step)
    return {"steps": sorted(steps, key=lambda step: step["step"]), "num_steps": len(files)}


def spread(items: list[int], num: int) -> list[int]:
    """At most `num` of `items`, evenly spaced, the first and the last among them."""
    if len(items) <= num:
        return items
    return [items[round(i * (len(items) - 1) / (num - 1))] for i in range(num)]


def coarse_to_fine(num: int) -> list[int]:
    """0 to `num - 1`: the last and the first, then what lies half way, then half way again."""
    order = dict.fromkeys([num - 1, 0] if num else [])
    stride = num
    while stride > 1:
        stride = (stride + 1) // 2
        order |= dict.fromkeys(range(0, num, stride))
    return list(order)


def _read_step(path: Path, tokenizer: Any, room: Room, num_tokens: int) -> dict[str, Any]:
    """Whole groups until they have `num_tokens`, at least one; `num_samples` counts the file's."""
    groups: dict[Any, dict[str, Any]] = {}
    num_samples = taken = 0
    full = False
    for number, line in numbered_lines(path):
        num_samples += 1
        if full:
            continue
        row = _row(f"{path}:{number}", line)
        uid = row.prompt_uid
        if uid not in groups:
            if full := taken >= num_tokens and bool(groups):
                continue
            groups[uid] = {"uid": uid, "prompt": row.prompt, "answer": row.answer, "samples": []}
        sample = _sample(row, tokenizer, room.tokens_per_sample)
        groups[uid]["samples"].append(sample)
        taken += len(sample["pieces"]) + TOKENS_BESIDES
    return {"groups": list(groups.values()), "num_samples": num_samples, "num_tokens": taken}


def _sample(row: _Row, tokenizer: Any, most: int) -> Sample:
    tokens, versions = row.tokens, row.versions
    parts, known = pieces(tokenizer, tokens, row.text)
    logprobs = [None if value is None else round(value, 4) for value in row.logprobs]
    sample: Sample = {
        "index": row.index,
        "reward": row.reward,
        "finish": row.finish,
        "parts": row.parts,
        "num_tokens": len(tokens),
        "known": known,
    }
    per_token: dict[str, list[Any]] = {
        "pieces": parts,
        "tokens": tokens,
        "logprobs": logprobs,
        "versions": versions,
    }
    if len(parts) > most:  # the beginning and the end
        sample["left_out_at"] = half = most // 2
        per_token = {name: values[:half] + values[-half:] for name, values in per_token.items()}
    if len(set(versions)) == 1:
        per_token["versions"] = versions[:1]
    return sample | per_token


def _row(where: str, line: bytes) -> _Row:
    try:
        return msgspec.convert(parse_finite_json(where, line), _Row)
    except msgspec.ValidationError as error:
        raise DataError(where, f"not the record of a sample: {error}") from None


def _step(path: Path) -> int:
    try:
        return int(path.stem.removeprefix("step_"))
    except ValueError:
        raise DataError(str(path), "not named after a step") from None

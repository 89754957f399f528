"""Samples on the report page: some groups of some steps, evenly spaced over the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from spmd_rl.errors import DataError
from spmd_rl.observe.jsonl import numbered_lines, parse_finite_json
from spmd_rl.report.conversations import (
    SampleOfTree,
    conversation_tree,
    num_letters,
    num_speeches,
)
from spmd_rl.report.prompt_names import prompt_name
from spmd_rl.report.token_texts import find_tokenizer, token_texts
from spmd_rl.types.samples import AGENT, ERROR, NO_VERSION, TURN_RECORDS, TURNS

OVERHEAD_TOKENS = 30  # the size of a sample without its tokens, in tokens
MAX_CONTEXT_TOKENS = 1_000  # of a sample's own context; its end is shown
Row = TypeVar("Row", bound=msgspec.Struct)

LETTERS_PER_TOKEN = 4  # of notes, which take as much room on the page


class _Row(msgspec.Struct):
    """The fields of a sample that the page shows. A number that is not finite is None."""

    prompt_uid: int | str | None = None
    index: int | None = None
    prompt: str = ""
    question: str = ""
    answer: str = ""
    text: str = ""
    reward: float | None = None
    status: str = ""
    tokens: list[int] = []
    logprobs: list[float | None] = []
    versions: list[int] = []
    parts: dict[str, float | None] = {}
    metadata: dict[str, Any] = {}
    execution: int = -1
    context: list[int] = []
    prompt_tokens: list[int] = []
    mask: list[bool] | None = None


class _ShownTurn(msgspec.Struct):
    """The part of a turn's record that the page shows."""

    first_token: int
    reward: float | None = None


@dataclass(frozen=True)
class PageBudget:
    """How many samples go on a page. A group is shown as a whole or not at all.

    `num_tokens` counts `OVERHEAD_TOKENS` for each sample, besides its tokens.
    """

    num_steps: int = 40
    num_tokens: int = 160_000
    tokens_per_sample: int = 2_000

    def share(self, num_runs: int) -> PageBudget:
        """Return the budget of each run if several share the page."""
        return replace(
            self,
            num_steps=self.num_steps // num_runs,
            num_tokens=self.num_tokens // num_runs,
        )


def read_samples(run: Path, config: dict[str, Any], budget: PageBudget) -> dict[str, Any]:
    """Return steps with their groups, and the number of all steps that have samples."""
    files = {_step(path): path for path in (run / "samples").glob("step_*.jsonl")}
    tokenizer = find_tokenizer(run, config)
    chosen = evenly_spaced(sorted(files), budget.num_steps)
    steps, left = [], budget.num_tokens
    for i in coarse_to_fine_order(len(chosen)):
        if left > 0:
            step = _read_step(
                files[chosen[i]], tokenizer, budget, min(left, budget.num_tokens // len(chosen))
            )
            left -= step.pop("num_tokens")
            steps.append({"step": chosen[i]} | step)
    return {"steps": sorted(steps, key=lambda step: step["step"]), "num_steps": len(files)}


def failed_errors(run: Path, step: int) -> Iterator[str]:
    """Yield why samples of a step failed. Raises: DataError for a damaged line."""
    path = run / "samples" / f"step_{step:05d}.jsonl"
    for number, line in numbered_lines(path) if path.is_file() else ():
        if (
            b'"failed"' in line
            and (row := sample_row(f"{path}:{number}", line, _Row)).status == "failed"
        ):
            yield str(row.metadata.get(ERROR, ""))


def sample_row(where: str, line: bytes, kind: type[Row]) -> Row:
    """Return the fields of a sample that `kind` has. Raises: DataError."""
    try:
        return msgspec.convert(parse_finite_json(where, line), kind)
    except msgspec.ValidationError as error:
        raise DataError(where, f"not a line of samples: {error}") from None


def evenly_spaced(items: list[int], num: int) -> list[int]:
    """Return at most `num` of `items`, evenly spaced from the first to the last."""
    if len(items) <= num:
        return items
    return [items[round(i * (len(items) - 1) / (num - 1))] for i in range(num)]


def coarse_to_fine_order(num: int) -> list[int]:
    """Return 0 to `num - 1` in this order: last, first, the middle, the quarters, and so on."""
    order = dict.fromkeys([num - 1, 0] if num else [])
    stride = num
    while stride > 1:
        stride = (stride + 1) // 2
        order |= dict.fromkeys(range(0, num, stride))
    return list(order)


def _read_step(path: Path, tokenizer: Any, budget: PageBudget, num_tokens: int) -> dict[str, Any]:
    """Return whole groups, at least one, until they have `num_tokens`.

    `num_samples` counts all samples of the file.
    """
    groups: dict[Any, dict[str, Any]] = {}
    rows: dict[Any, list[_Row]] = {}
    num_samples = taken = 0
    full = False
    for number, line in numbered_lines(path):
        num_samples += 1
        if full:
            continue
        row = sample_row(f"{path}:{number}", line, _Row)
        uid = row.prompt_uid
        if uid not in groups:
            if full := taken >= num_tokens and bool(groups):
                continue
            name = prompt_name(row.prompt, row.question)
            groups[uid] = {"uid": uid, "name": name, "prompt": row.prompt, "answer": row.answer}
            groups[uid]["samples"] = []
            rows[uid] = []
        rows[uid].append(row)
        sample = _sample(row, tokenizer, budget.tokens_per_sample)
        groups[uid]["samples"].append(sample)
        letters = sum(map(len, sample["notes"].values())) + len(sample.get("context", ""))
        taken += len(sample["pieces"]) + letters // LETTERS_PER_TOKEN + OVERHEAD_TOKENS
    for uid, own in rows.items():
        groups[uid]["conversations"] = trees = _conversations(own, tokenizer)
        taken += sum(num_letters(one["tree"]) for one in trees) // LETTERS_PER_TOKEN
    return {"groups": list(groups.values()), "num_samples": num_samples, "num_tokens": taken}


def _sample(row: _Row, tokenizer: Any, max_tokens: int) -> dict[str, Any]:
    texts, known = token_texts(tokenizer, row.tokens, row.text)
    sample = _without_tokens(row) | {"known": known, "turns": _turns(row)}
    if row.context:
        sample["context"] = _context_text(tokenizer, row.context)
    per_token = _per_token(row, texts)
    if len(texts) > max_tokens:  # keep the beginning and the end
        sample["left_out_at"] = half = max_tokens // 2
        per_token = {name: values[:half] + values[-half:] for name, values in per_token.items()}
    if len(set(row.versions)) == 1:
        per_token["versions"] = row.versions[:1]
    return sample | per_token


def _without_tokens(row: _Row) -> dict[str, Any]:
    """Return the sample as the page shows it, with the number of its tokens in their place."""
    return {
        "index": row.index,
        "reward": row.reward,
        "status": row.status,
        "parts": row.parts,
        "error": str(row.metadata.get("error", "")),
        "notes": _notes(row),
        "agent": str(row.metadata.get(AGENT, "")),
        "execution": row.execution,
        "num_tokens": len(row.tokens),
    }


def _notes(row: _Row) -> dict[str, str]:
    """Return what hooks noted, such as the reasons of a judge."""
    notes = row.metadata.get("notes")
    return {name: str(text) for name, text in notes.items()} if isinstance(notes, dict) else {}


def _turns(row: _Row) -> list[dict[str, Any]]:
    """Return the first token and the reward of each turn that an environment has recorded."""
    try:
        records = msgspec.convert(row.metadata.get(TURN_RECORDS, []), list[_ShownTurn])
    except msgspec.ValidationError:  # a hook may have put anything there
        return []
    return [{"first": one.first_token, "reward": one.reward} for one in records]


def _conversations(rows: list[_Row], tokenizer: Any) -> list[dict[str, Any]]:
    """Return the tree of each episode of a group that has several speeches, or several samples."""
    episodes: dict[tuple[str, int | None], list[SampleOfTree]] = {}
    for row in rows:
        key = ("episode", row.execution) if row.execution >= 0 else ("sample", row.index)
        if len(row.tokens) == len(row.versions) and row.tokens:
            episodes.setdefault(key, []).append(_sample_of_tree(row))

    def text_of(tokens: Sequence[int]) -> str | None:
        texts, known = token_texts(tokenizer, tokens, "")
        return "".join(texts) if known else None

    trees = {
        f"{kind} {number}": conversation_tree(samples, text_of)
        for (kind, number), samples in episodes.items()
    }
    return [{"name": name, "tree": tree} for name, tree in trees.items() if num_speeches(tree) > 1]


def _sample_of_tree(row: _Row) -> SampleOfTree:
    mask = [version != NO_VERSION for version in row.versions] if row.mask is None else row.mask
    messages = row.metadata.get(TURNS, [])
    return SampleOfTree(
        row.index,
        row.context or row.prompt_tokens,
        row.tokens,
        row.versions,
        mask if len(mask) == len(row.tokens) else [False] * len(row.tokens),
        messages if isinstance(messages, list) else [],
        str(row.metadata.get(AGENT, "")),
        {turn["first"]: turn["reward"] for turn in _turns(row)},
        bool(row.context),
    )


def _context_text(tokenizer: Any, context: list[int]) -> str:
    """Return the end of a context as text; without a tokenizer, how long it is."""
    shown = context[-MAX_CONTEXT_TOKENS:]
    texts, known = token_texts(tokenizer, shown, "")
    left_out = f"… {len(context) - len(shown):,} tokens …\n" if len(shown) < len(context) else ""
    return left_out + "".join(texts) if known else f"{len(context):,} tokens"


def _per_token(row: _Row, texts: list[str]) -> dict[str, list[Any]]:
    """Return what the page shows of each token. One that no engine drew has no log-prob."""
    is_drawn = [version != NO_VERSION for version in row.versions] or [True] * len(row.tokens)
    return {
        "pieces": texts,
        "tokens": row.tokens,
        "logprobs": [
            None if value is None or not drawn else round(value, 4)
            for value, drawn in zip(row.logprobs, is_drawn, strict=False)
        ],
        "versions": row.versions,
    }


def _step(path: Path) -> int:
    try:
        return int(path.stem.removeprefix("step_"))
    except ValueError:
        raise DataError(str(path), "the name of this file has no step number") from None

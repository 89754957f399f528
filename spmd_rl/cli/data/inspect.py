"""What a data file holds, and which of its records a run would refuse."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from spmd_rl.check.inputs import check_golds, check_record
from spmd_rl.check.vocabulary import check_vocabulary
from spmd_rl.cli.data.problems import RefusedRecord, problem_of
from spmd_rl.cli.data.view import View
from spmd_rl.data.files.files import open_records
from spmd_rl.data.files.record import DataRecord, Records
from spmd_rl.data.files.record_store import Preparer
from spmd_rl.data.prompt_records import PromptConfig, graded
from spmd_rl.data.render.prompt_format import PromptEncoder, is_too_long
from spmd_rl.errors import DataError
from spmd_rl.model.read import model_folder, read_spec
from spmd_rl.model.tokenizer import load_tokenizer

_GROUP = 512  # records that are tokenised together
MAX_GRADED = 10_000  # records of a file whose answer is parsed as the graders do
PERCENTILES = (0, 50, 90, 99, 100)
COUNTS = ("broken", "duplicate_prompts", "too_long")


@dataclass
class Checked:
    """What a check of a file found: a sentence for each record that a run would refuse.

    `num_dropped` counts those that it would leave out, which `defect` describes. Of conversations,
    `num_split` are learned in several sequences, `num_sequences` together. `notes` are sentences of
    what the run does, which a user may not expect.
    """

    num_records: int = 0
    problems: list[RefusedRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_dropped: int = 0
    defect: str = ""
    num_split: int = 0
    num_sequences: int = 0

    def add(self, prepared: Any) -> None:
        """Count what a recipe makes of a record; None for one that it leaves out."""
        self.num_dropped += prepared is None
        if isinstance(prepared, list) and len(prepared) > 1:
            self.num_split += 1
            self.num_sequences += len(prepared)


def check_records(
    records: Records, view: View, model: str | None, rewards: Sequence[str] = ()
) -> Checked:
    """Return what a run of the view's recipe would refuse of a file or slice.

    `rewards` are the canonical names of the run's graders, which take the first `MAX_GRADED`.

    The file may be larger than memory. With a model, the records are tokenised as in the run.
    Raises: ConfigError for a model or settings that cannot be used at all.
    """
    preparer = None
    if model:
        check_vocabulary(model, read_spec(model_folder(model)).vocab_size)
        preparer = view.preparer(load_tokenizer(model))
    found, of_graders = Checked(defect=preparer.defect if preparer else ""), graded(view.cfg)
    for group in _groups(records):
        num_before = found.num_records
        found.num_records += len(group)
        problems: dict[int, RefusedRecord] = {}  # by the place in the group
        sound: dict[int, DataRecord] = {}
        for place, record in enumerate(group):
            try:
                sound[place] = _checked(record, view)
                if num_before + place < MAX_GRADED and of_graders:
                    check_golds([sound[place]], of_graders, rewards)
            except DataError as error:
                problems[place] = problem_of(error, record, view.cfg)
                sound.pop(place, None)
        if preparer is not None and sound:
            refused = _prepare(sound, preparer, found)
            problems |= {n: problem_of(error, sound[n], view.cfg) for n, error in refused.items()}
        found.problems += [problems[place] for place in sorted(problems)]
    found.notes = preparer.notes() if preparer else []
    return found


def _checked(record: DataRecord | DataError, view: View) -> DataRecord:
    """Return the record. Raises: DataError for one that is malformed or has another form."""
    if isinstance(record, DataError):
        raise record
    check_record(record, view.cfg, view.learn)
    return record


def _prepare(
    records: dict[int, DataRecord], preparer: Preparer[Any], found: Checked
) -> dict[int, DataError]:
    """Prepare records as the run does, and return what it refuses.

    They are prepared together, or one by one where one is refused.
    """
    try:
        for prepared in preparer.make([*records.values()], ""):
            found.add(prepared)
    except DataError as problem:
        if len(records) == 1:
            return dict.fromkeys(records, problem)
        alone = [_prepare({place: one}, preparer, found) for place, one in records.items()]
        return {place: refused for part in alone for place, refused in part.items()}
    return {}


def _groups(records: Records) -> Iterator[list[DataRecord | DataError]]:
    """Yield all records in lists, so that they need not fit into memory."""
    each = records.each()
    while group := [*islice(each, _GROUP)]:
        yield group


def first_record(records: Records) -> DataRecord | None:
    """Return the first record of a file that is not malformed, of the first ones; else None."""
    for record in islice(records.each(), _GROUP):
        if isinstance(record, DataRecord):
            return record
    return None


class _Tally:
    """Counts what the records of a file hold."""

    def __init__(self, cfg: PromptConfig, tokenizer: Any) -> None:
        self._cfg = cfg
        self._encoder = PromptEncoder(cfg, tokenizer) if tokenizer else None
        self._context = tokenizer.context if tokenizer else 0
        self._counts: Counter[str] = Counter()
        self._fields: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._lengths: defaultdict[str, list[int]] = defaultdict(list)
        self._roles: Counter[str] = Counter()
        self._sources: Counter[str] = Counter()
        self._seen: set[bytes] = set()  # digests of prompts

    def add(self, record: DataRecord | DataError) -> None:
        self._counts["records"] += 1
        if isinstance(record, DataError):
            self._counts["broken"] += 1
            return
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
        if self._encoder is None:
            return
        num_tokens = _num_tokens(record, self._encoder)
        if num_tokens is not None:
            self._lengths["tokens"].append(num_tokens)
            self._counts["too_long"] += is_too_long(self._cfg, num_tokens, self._context)

    def figures(self) -> dict[str, Any]:
        return {
            **{name: self._counts[name] for name in ("records", *COUNTS)},
            "fields": {key: dict(kinds) for key, kinds in self._fields.items()},
            "lengths": {name: _percentiles(values) for name, values in self._lengths.items()},
            "roles": dict(self._roles),
            "sources": dict(self._sources),
        }


def describe_file(path: str, cfg: PromptConfig, model: str | None) -> dict[str, Any]:
    """Return figures of a file or slice as plain data.

    Lengths are percentiles. A prompt that a run would refuse has no length in tokens.
    """
    tally = _Tally(cfg, load_tokenizer(model) if model else None)
    for record in open_records(path).each():
        tally.add(record)
    return tally.figures()


def _messages(row: dict[str, Any], prompt_key: str) -> list[dict[str, Any]]:
    given = row.get(prompt_key) if isinstance(row.get(prompt_key), list) else row.get("messages")
    return [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []


def _num_characters(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    items = prompt if isinstance(prompt, list) else []
    return sum(len(str(item.get("content") or "")) for item in items if isinstance(item, dict))


def _num_tokens(record: DataRecord, encoder: PromptEncoder) -> int | None:
    try:
        return len(encoder.encode([record])[0][1])
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

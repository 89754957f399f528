"""Problems of a data file's records as lines: what many records have in common is said once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spmd_rl.data.files.record import DataRecord
from spmd_rl.data.render.prompt_format import PromptFormat
from spmd_rl.errors import DataError

_FEW = 3  # records with the same problem, which have a line each
_SETTINGS = ("prompt_key", "answer_key", "chosen_key", "rejected_key")
# how files of others call a prompt and its answer
_OFTEN = {
    "prompt_key": ("question", "problem", "instruction", "query", "input"),
    "answer_key": (
        *("label", "solution", "target", "response", "output", "completion", "ground_truth"),
        "reward_model.ground_truth",
    ),
}


class RefusedRecord(NamedTuple):
    """What a run would refuse of a record: where it stands, and a sentence.

    `lacks` is the setting whose key the record has not, or "", and `has` the keys that could be it.
    """

    where: str
    sentence: str
    lacks: str = ""
    has: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.sentence}"


def problem_of(
    error: DataError, record: DataRecord | DataError, cfg: PromptFormat
) -> RefusedRecord:
    """Return the problem of a record, perhaps a malformed one, that a run with these settings
    refuses.
    """
    sentence = str(error).removeprefix(f"{record.where}: ")
    if isinstance(record, DataError):
        return RefusedRecord(record.where, sentence)
    keys = {name: getattr(cfg, name, "") for name in _SETTINGS}
    lacks = next((name for name, key in keys.items() if key and not record.has(key)), "")
    if not lacks:
        return RefusedRecord(record.where, sentence)
    return RefusedRecord(record.where, sentence, lacks, tuple(_candidates(record, lacks, cfg)))


def _candidates(record: DataRecord, setting: str, cfg: PromptFormat) -> Iterator[str]:
    kinds = (str, list) if setting == "prompt_key" else (str, int, float)
    for key in record.key_names():
        value = record.get(key)
        if key not in cfg.used_keys and isinstance(value, kinds) and not isinstance(value, bool):
            yield key


def problem_lines(
    problems: Sequence[RefusedRecord], num_records: int, cfg: PromptFormat, show: int
) -> Iterator[str]:
    """Yield at most `show` lines on the problems, and one on those that are left."""
    groups: dict[tuple[str, str], list[RefusedRecord]] = {}
    for problem in problems:
        groups.setdefault(_kind(problem), []).append(problem)
    num_lines = num_said = 0
    for problem in problems:
        group = groups[_kind(problem)]
        is_said_once = len(group) > _FEW
        if is_said_once and problem is not group[0]:
            continue
        if num_lines == show:
            break
        num_lines, num_said = num_lines + 1, num_said + (len(group) if is_said_once else 1)
        if not is_said_once:
            yield str(problem)
        elif problem.lacks:
            yield _lacking(group, num_records, cfg)
        else:
            yield f"{problem} (so it is with {len(group)} of {num_records} records)"
    if num_left := len(problems) - num_said:
        yield f"... and {num_left} more"


def _kind(problem: RefusedRecord) -> tuple[str, str]:
    """Return what equal problems have in common."""
    return problem.lacks, "" if problem.lacks else problem.sentence


def _lacking(group: Sequence[RefusedRecord], num_records: int, cfg: PromptFormat) -> str:
    """Return a line on records that lack the same key, and which of their keys may be meant."""
    setting = group[0].lacks
    counts = Counter(key for problem in group for key in problem.has)
    common = [key for key, count in counts.items() if count == len(group)]
    often = [key for key in _OFTEN.get(setting, ()) if key in common] or common
    meant = often[0] if len(often) == 1 else "KEY"
    have = f"; they have {', '.join(map(repr, common))}" if common else ""
    return (
        f"{len(group)} of {num_records} records lack {getattr(cfg, setting)!r}{have}: give "
        f"--prompts.{setting}={meant}"
    )

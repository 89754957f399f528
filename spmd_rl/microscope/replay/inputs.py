"""What to replay: samples that a run wrote, or prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index as exact
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.config.load import read_toml
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.microscope.replay.case import Case, Replayed
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.tokenizer import FolderTokenizer, load_tokenizer
from spmd_rl.observe.jsonl import numbered_lines, parse_json
from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.rollout.engine import SamplingConfig

DEFAULT_SAMPLES = 8
MAX_STEPS = 4  # in a sentence


@dataclass(frozen=True)
class Sample:
    """A line of a run's samples; log-probs and versions of the tokens where the line has them."""

    prompt_uid: int
    index: int
    prompt: str
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32] | None
    versions: frozenset[int]

    @property
    def name(self) -> str:
        return f"{self.prompt_uid}:{self.index}"


def run_settings(run: Path) -> dict[str, Any]:
    """The run's config. Raises: ConfigError when the folder is none of a run."""
    if not (run / "config.toml").is_file():
        raise ConfigError(f"{run} is not the folder of a run: it has no config.toml")
    return read_toml(run / "config.toml")


def mismatched_tokens(run: Path) -> dict[int, int]:
    """What the run counted, by step."""
    counts = {
        row["step"]: row.get("onpolicy/mismatched_tokens")
        for row in read_metrics(run / "metrics.jsonl")
    }
    return {
        step: int(count)
        for step, count in counts.items()
        if isinstance(count, (int, float)) and count
    }


def by_step(counts: dict[int, int]) -> str:
    """`3 in step 57, 1 in step 60`."""
    named = [f"{count:,} in step {step}" for step, count in list(counts.items())[:MAX_STEPS]]
    rest = list(counts.values())[MAX_STEPS:]
    return ", ".join([*named, *([f"{sum(rest):,} in {len(rest)} more"] if rest else [])])


def samples_of(run: Path, wanted: Sequence[str] = (), step: int | None = None) -> list[Sample]:
    """The samples `uid:index`, the newest of each name; of none, a few of the last step, of as many
    prompts as it has.

    With a step only those of that one. Raises: ConfigError for a name that no step holds, DataError
    for a broken file.
    """
    files = sorted((run / "samples").glob("step_*.jsonl"), reverse=True)
    if step is not None:
        files = [file for file in files if file.stem == f"step_{step:05d}"]
    of = run if step is None else f"step {step} of {run}"
    if wanted:
        return _wanted(files, wanted, str(of))
    rows = next((list(rows.values()) for file in files if (rows := _rows(file))), [])
    if not rows:
        raise ConfigError(f"{of} has no samples to replay: give --prompts, or another step")
    return _first_of_each(rows)[:DEFAULT_SAMPLES]


def samples_of_run(run: Path, model: Path, settings: dict[str, Any], wanted: Sequence[str]) -> Case:
    """As `samples_of` finds them and `as_case` reads them."""
    return as_case(samples_of(run, wanted), model, settings)


def as_case(samples: Sequence[Sample], model: Path, settings: dict[str, Any]) -> Case:
    """Raises: DataError for a sample that the model cannot take."""
    tokenizer = load_tokenizer(model)
    special = not settings.get("prompts", {}).get("chat_template", False)
    drawn = {
        key: settings.get("sampling", {}).get(key)
        for key in ("temperature", "top_p", "top_k", "min_p")
    }
    sampling = SamplingConfig(**{key: value for key, value in drawn.items() if value is not None})
    seed = settings.get("run", {}).get("seed", 0)
    prompts = _encoded(tokenizer, [one.prompt for one in samples], model, special)
    sequences = [
        Replayed(
            one.name,
            prompt,
            one.tokens,
            sampling,
            (one.prompt_uid, one.index),
            one.prompt,
            one.logprobs,
            seed,
        )
        for one, prompt in zip(samples, prompts, strict=True)
    ]
    return checked(sequences, ModelSpec.from_folder(model), tokenizer)


def prompts_given(texts: Sequence[str], model: Path) -> Case:
    """Each text as a sequence whose second half is decoded token by token."""
    spec, tokenizer = ModelSpec.from_folder(model), load_tokenizer(model)
    halves = [((len(ids) + 1) // 2, ids) for ids in _encoded(tokenizer, texts, model)]
    sequences = [
        Replayed(f"prompt {n}", ids[:half], ids[half:], text=text)
        for n, ((half, ids), text) in enumerate(zip(halves, texts, strict=True), 1)
    ]
    return checked(sequences, spec, tokenizer)


def checked(
    sequences: Sequence[Replayed], spec: ModelSpec, tokenizer: FolderTokenizer | None = None
) -> Case:
    """Raises: DataError for a sequence that the model cannot take."""
    for one in sequences:
        if not len(one.prompt) or not len(one.response):
            raise DataError(one.name, "needs a token to start from and one to decode")
        if len(one.tokens) > spec.max_positions:
            raise DataError(
                one.name,
                f"has {len(one.tokens)} tokens, but the model's context is {spec.max_positions}",
            )
        if one.tokens.min() < 0 or one.tokens.max() >= spec.vocab_size:
            raise DataError(
                one.name, f"has token ids outside the model's vocabulary of {spec.vocab_size}"
            )
    return Case(tuple(sequences), tokenizer.decode if tokenizer else None)


def not_as_given(case: Case) -> list[str]:
    """A sentence where the tokenizer does not give a text back, so that another one is replayed."""
    texts = {one.name: (one.text, case.text(one.tokens.tolist())) for one in case.sequences}
    lost = {
        name: replayed for name, (text, replayed) in texts.items() if text.strip() not in replayed
    }
    if not lost:
        return []
    name, replayed = next(iter(lost.items()))
    others = f"; {len(lost) - 1} more neither" if len(lost) > 1 else ""
    return [f"{name} does not survive the tokenizer: what is replayed reads {replayed!r}{others}."]


def _encoded(
    tokenizer: FolderTokenizer, texts: Sequence[str], model: Path, special: bool = True
) -> list[NDArray[np.int64]]:
    """Raises: ConfigError where nothing comes of any text, as from a folder without a tokenizer's
    files.
    """
    encoded = tokenizer(list(texts), add_special_tokens=special)["input_ids"]
    if not any(encoded) and any(texts):
        raise ConfigError(f"the tokenizer in {model} makes no tokens: are its files there?")
    return [np.array(ids, np.int64) for ids in encoded]


def _wanted(files: Sequence[Path], names: Sequence[str], of: str) -> list[Sample]:
    found: dict[str, Sample] = {}
    for file in files:
        found |= {
            name: row for name, row in _rows(file).items() if name in names and name not in found
        }
        if len(found) == len(set(names)):
            return [found[name] for name in dict.fromkeys(names)]
    missing = next(name for name in names if name not in found)
    raise ConfigError(f"{of} has no sample {missing} (samples are named uid:index)")


def _first_of_each(samples: Sequence[Sample]) -> list[Sample]:
    """The first of every prompt, then the second of every one, and so on."""
    seen: Counter[int] = Counter()
    places = []
    for one in samples:
        places.append(seen[one.prompt_uid])
        seen[one.prompt_uid] += 1
    return [samples[at] for at in sorted(range(len(samples)), key=places.__getitem__)]


def _rows(file: Path) -> dict[str, Sample]:
    """The samples of one step that have tokens, by name."""
    rows = {}
    for number, line in numbered_lines(file):
        row = parse_json(f"{file}:{number}", line)
        try:
            one = _sample(row)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            problem = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{file}:{number}", f"not the record of a sample: {problem}") from None
        if len(one.tokens):
            rows[one.name] = one
    return rows


def _sample(row: dict[str, Any]) -> Sample:
    tokens = np.array([exact(token) for token in row["tokens"]], np.int64)
    logprobs = np.array(row["logprobs"], np.float32) if "logprobs" in row else None
    if logprobs is not None and logprobs.shape != tokens.shape:
        raise ValueError(f"it has {len(tokens)} tokens and {logprobs.size} log-probs")
    versions = frozenset(exact(version) for version in row.get("versions", ()))
    return Sample(
        exact(row["prompt_uid"]),
        exact(row["index"]),
        str(row["prompt"]),
        tokens,
        logprobs,
        versions,
    )

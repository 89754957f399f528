"""Inputs of a replay: samples that a run wrote, or prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index as exact_int
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.config.likely import did_you_mean_path
from spmd_rl.config.load import read_toml
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.tokenizer import FolderTokenizer, load_tokenizer
from spmd_rl.observe.jsonl import numbered_lines, parse_json
from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.types.samples import NO_VERSION

DEFAULT_SAMPLES = 8
MAX_LISTED_STEPS = 4  # in a sentence


@dataclass(frozen=True)
class RecordedSample:
    """A line of a run's samples. Log-probs and versions of its tokens may be missing.

    A log-prob is NaN for a token that no engine drew, such as one of an observation.
    """

    prompt_uid: int
    index: int
    prompt: str
    prompt_tokens: NDArray[np.int64]
    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32] | None
    versions: frozenset[int]

    @property
    def name(self) -> str:
        return f"{self.prompt_uid}:{self.index}"


def run_settings(run: Path) -> dict[str, Any]:
    """Return the run's config. Raises: ConfigError if the folder is not that of a run."""
    if not (run / "config.toml").is_file():
        raise ConfigError(
            f"{run} is not the folder of a run: it has no config.toml{did_you_mean_path(run)}"
        )
    return read_toml(run / "config.toml")


def mismatched_tokens(run: Path) -> dict[int, int]:
    """Return the mismatched tokens that the run counted, by step."""
    return {
        row["step"]: int(count)
        for row in read_metrics(run / "metrics.jsonl")
        if isinstance(count := row.get("onpolicy/mismatched_tokens"), (int, float)) and count
    }


def list_by_step(counts: dict[int, int]) -> str:
    """Return text like `3 in step 57, 1 in step 60`."""
    listed = list(counts.items())[:MAX_LISTED_STEPS]
    parts = [f"{count:,} in step {step}" for step, count in listed]
    if rest := list(counts.values())[MAX_LISTED_STEPS:]:
        parts.append(f"{sum(rest):,} in {len(rest)} more")
    return ", ".join(parts)


def find_samples(
    run: Path, wanted: Sequence[str] = (), step: int | None = None
) -> list[RecordedSample]:
    """Return the newest sample of each name `uid:index`, or a few of the last step.

    Those few are of as many prompts as possible. With `step`, only samples of that step count.
    Raises: ConfigError for a name that no step holds; DataError for a broken file.
    """
    files = sorted((run / "samples").glob("step_*.jsonl"), reverse=True)
    if step is not None:
        files = [file for file in files if file.stem == f"step_{step:05d}"]
    of = run if step is None else f"step {step} of {run}"
    if wanted:
        return _find_by_name(files, wanted, str(of))
    rows = next((list(rows.values()) for file in files if (rows := _read_samples(file))), [])
    if not rows:
        raise ConfigError(f"{of} has no samples to replay: give --prompts, or another step")
    return _first_of_each(rows)[:DEFAULT_SAMPLES]


def case_of_samples(
    samples: Sequence[RecordedSample], model: Path, settings: dict[str, Any]
) -> ReplayCase:
    """Return the case of `samples`. Raises: DataError for one that the model cannot take."""
    tokenizer = load_tokenizer(model)
    seed = settings.get("run", {}).get("seed", 0)
    sampling = _sampling_config(settings.get("sampling", {}))
    if sampling.replays:
        # they are those over kept sets, and a replay scores over the whole vocabulary
        samples = [replace(sample, logprobs=None) for sample in samples]
    sequences = [
        ReplaySequence(
            sample.name,
            sample.prompt_tokens,
            sample.tokens,
            sampling,
            (sample.prompt_uid, sample.index),
            sample.prompt,
            sample.logprobs,
            seed,
        )
        for sample in samples
    ]
    return checked_case(sequences, read_spec(model), tokenizer)


def _sampling_config(settings: dict[str, Any]) -> SamplingConfig:
    """Return what draws a token in a run; when a sample ends is known from the sample."""
    keys = ("temperature", "top_p", "top_k", "min_p", "replay_filters")
    return SamplingConfig(**{key: settings[key] for key in keys if settings.get(key) is not None})


def case_of_prompts(texts: Sequence[str], model: Path) -> ReplayCase:
    """Return each text as a sequence whose second half is decoded token by token."""
    spec, tokenizer = read_spec(model), load_tokenizer(model)
    halves = [((len(ids) + 1) // 2, ids) for ids in _encoded(tokenizer, texts, model)]
    sequences = [
        ReplaySequence(f"prompt {n}", ids[:half], ids[half:], text=text)
        for n, ((half, ids), text) in enumerate(zip(halves, texts, strict=True), 1)
    ]
    return checked_case(sequences, spec, tokenizer)


def checked_case(
    sequences: Sequence[ReplaySequence], spec: ModelSpec, tokenizer: FolderTokenizer | None = None
) -> ReplayCase:
    """Return the case of `sequences`. Raises: DataError for one that the model cannot take."""
    for sequence in sequences:
        if not len(sequence.prompt) or not len(sequence.response):
            raise DataError(sequence.name, "needs a token to start from and one to decode")
        if len(sequence.tokens) > spec.max_positions:
            raise DataError(
                sequence.name,
                f"has {len(sequence.tokens)} tokens, "
                f"but the model's context is {spec.max_positions}",
            )
        if sequence.tokens.min() < 0 or sequence.tokens.max() >= spec.vocab_size:
            raise DataError(
                sequence.name, f"has token ids outside the model's vocabulary of {spec.vocab_size}"
            )
    return ReplayCase(tuple(sequences), tokenizer.decode if tokenizer else None)


def tokenizer_notes(case: ReplayCase) -> list[str]:
    """Return a sentence if the tokenizer changes a text, so that another text is replayed."""
    texts = {
        sequence.name: (sequence.text, case.text(sequence.tokens.tolist()))
        for sequence in case.sequences
    }
    lost = {
        name: replayed for name, (text, replayed) in texts.items() if text.strip() not in replayed
    }
    if not lost:
        return []
    name, replayed = next(iter(lost.items()))
    others = f"; {len(lost) - 1} more neither" if len(lost) > 1 else ""
    return [f"{name} does not survive the tokenizer: what is replayed reads {replayed!r}{others}."]


def _encoded(
    tokenizer: FolderTokenizer, texts: Sequence[str], model: Path
) -> list[NDArray[np.int64]]:
    """Return the tokens of each text.

    Raises: ConfigError if no text has any, as in a folder without a tokenizer's files.
    """
    encoded = tokenizer(list(texts))["input_ids"]
    if not any(encoded) and any(texts):
        raise ConfigError(f"the tokenizer in {model} makes no tokens: are its files there?")
    return [np.array(ids, np.int64) for ids in encoded]


def _find_by_name(files: Sequence[Path], names: Sequence[str], of: str) -> list[RecordedSample]:
    found: dict[str, RecordedSample] = {}
    for file in files:
        found |= {
            name: row
            for name, row in _read_samples(file).items()
            if name in names and name not in found
        }
        if len(found) == len(set(names)):
            return [found[name] for name in dict.fromkeys(names)]
    missing = next(name for name in names if name not in found)
    raise ConfigError(f"{of} has no sample {missing} (samples are named uid:index)")


def _first_of_each(samples: Sequence[RecordedSample]) -> list[RecordedSample]:
    """Return the first sample of every prompt, then the second of every prompt, and so on."""
    num_seen: Counter[int] = Counter()
    rounds: list[tuple[int, RecordedSample]] = []
    for sample in samples:
        rounds.append((num_seen[sample.prompt_uid], sample))
        num_seen[sample.prompt_uid] += 1
    return [sample for _, sample in sorted(rounds, key=lambda one: one[0])]


def _read_samples(file: Path) -> dict[str, RecordedSample]:
    """Return the samples of one step that have tokens, by name."""
    rows = {}
    for number, line in numbered_lines(file):
        row = parse_json(f"{file}:{number}", line)
        try:
            sample = _parse_sample(row)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            problem = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{file}:{number}", f"not the record of a sample: {problem}") from None
        if len(sample.tokens):
            rows[sample.name] = sample
    return rows


def _parse_sample(row: dict[str, Any]) -> RecordedSample:
    tokens = np.array([exact_int(token) for token in row["tokens"]], np.int64)
    logprobs = np.array(row["logprobs"], np.float32) if "logprobs" in row else None
    if logprobs is not None and logprobs.shape != tokens.shape:
        raise ValueError(f"it has {len(tokens)} tokens and {logprobs.size} log-probs")
    versions = [exact_int(version) for version in row.get("versions", ())]
    if logprobs is not None and len(versions) == len(tokens):
        logprobs[np.array(versions, np.int64) == NO_VERSION] = np.nan
    return RecordedSample(
        exact_int(row["prompt_uid"]),
        exact_int(row["index"]),
        str(row["prompt"]),
        np.array(
            [exact_int(token) for token in row.get("context") or row["prompt_tokens"]], np.int64
        ),
        tokens,
        logprobs,
        frozenset(versions) - {NO_VERSION},
    )

"""What to replay: samples that a run wrote, or prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.config import read_toml
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.microscope.case import Case, Replayed
from spmd_rl.model.hf import has_weights
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.observe.metrics import read_metrics
from spmd_rl.rollout.engine import SamplingConfig

DEFAULT_SAMPLES = 8


def run_settings(run: Path) -> dict[str, Any]:
    """The run's config. Raises: ConfigError when the folder is none of a run."""
    if not (run / "config.toml").is_file():
        raise ConfigError(f"{run} is not the folder of a run: it has no config.toml")
    return read_toml(run / "config.toml")


def run_model(run: Path) -> Path:
    """Raises: ConfigError when the run exported no weights."""
    if not has_weights(run / "hf"):
        raise ConfigError(f"{run} has no weights to replay: {run / 'hf'} holds none, so name a model with --model")
    return run / "hf"


def mismatched_tokens(run: Path) -> int:
    """All that the run counted. Raises: DataError for a broken metrics.jsonl."""
    return sum(int(row.get("onpolicy/mismatched_tokens") or 0) for row in read_metrics(run / "metrics.jsonl"))


def samples_of_run(run: Path, model: Path, settings: dict[str, Any], wanted: Sequence[str]) -> Case:
    """The samples `uid:index`, the newest of each name; of none, the first of the last step.

    Raises: ConfigError for a name that no step holds, DataError for a broken file.
    """
    files = sorted((run / "samples").glob("step_*.jsonl"), reverse=True)
    if not files:
        raise ConfigError(f"{run} has no samples to replay: give --prompts")
    spec, tokenizer = ModelSpec.from_folder(model), load_tokenizer(model)
    special = not settings.get("prompts", {}).get("chat_template", False)
    drawn = {key: settings.get("sampling", {}).get(key) for key in ("temperature", "top_p", "top_k", "min_p")}
    drawn["seed"] = settings.get("run", {}).get("seed")
    sampling = SamplingConfig(**{key: value for key, value in drawn.items() if value is not None})
    rows = _wanted(files, wanted) if wanted else list(_rows(files[0]).items())[:DEFAULT_SAMPLES]
    texts = [str(row["prompt"]) for _, row in rows]
    prompts = tokenizer(texts, add_special_tokens=special)["input_ids"]
    sequences = [
        Replayed(
            name,
            np.array(prompt, np.int64),
            np.array(row["tokens"], np.int64),
            sampling,
            (int(row["prompt_uid"]), int(row["index"])),
        )
        for (name, row), prompt in zip(rows, prompts, strict=True)
    ]
    return checked(sequences, spec)


def prompts_given(texts: Sequence[str], model: Path) -> Case:
    """Each text as a sequence whose second half is decoded token by token."""
    spec = ModelSpec.from_folder(model)
    encoded = load_tokenizer(model)(list(texts))["input_ids"]
    tokens = [np.array(ids, np.int64) for ids in encoded]
    halves = [(ids[: (len(ids) + 1) // 2], ids[(len(ids) + 1) // 2 :]) for ids in tokens]
    return checked([Replayed(f"prompt {n}", *half) for n, half in enumerate(halves, 1)], spec)


def checked(sequences: Sequence[Replayed], spec: ModelSpec) -> Case:
    """Raises: DataError for a sequence that the model cannot take."""
    for one in sequences:
        if not len(one.prompt) or not len(one.response):
            raise DataError(one.name, "needs a token to start from and one to decode")
        if len(one.tokens) > spec.max_positions:
            raise DataError(one.name, f"has {len(one.tokens)} tokens, but the model's context is {spec.max_positions}")
        if one.tokens.min() < 0 or one.tokens.max() >= spec.vocab_size:
            raise DataError(one.name, f"has token ids outside the model's vocabulary of {spec.vocab_size}")
    return Case(tuple(sequences))


def _wanted(files: Sequence[Path], names: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        found |= {name: row for name, row in _rows(file).items() if name in names and name not in found}
        if len(found) == len(set(names)):
            return [(name, found[name]) for name in dict.fromkeys(names)]
    missing = next(name for name in names if name not in found)
    raise ConfigError(f"no step of {files[0].parent.parent} has a sample {missing} (samples are named uid:index)")


def _rows(file: Path) -> dict[str, dict[str, Any]]:
    """The samples of one step that have tokens, by name."""
    rows = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            if row["tokens"]:
                rows[f"{row['prompt_uid']}:{row['index']}"] = row
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file}:{number}", f"not the record of a sample: {error}") from None
    return rows

"""Model card of an exported folder: the README.md that a hub shows, with its head in YAML."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spmd_rl.config.load import read_toml
from spmd_rl.errors import ConfigError
from spmd_rl.observe.atomic_write import write_atomically
from spmd_rl.observe.metrics_log import read_metrics

CARD = "README.md"
_CLASSIFIER = "ForSequenceClassification"  # in the config.json of a model with a value head
_UNEQUAL, _COMPARED = "onpolicy/mismatched_tokens", "onpolicy/compared_tokens"


def write_card(target: Path, run: Path, base: str, step: int | None = None, note: str = "") -> None:
    """Write the card of the folder `target`, with what the folder of its run says.

    Without `step`, the weights are those after the run's last step. `base` is the folder of the
    first model. `note` is a sentence about the weights.
    """
    settings, is_adapter = _settings(run), (target / "adapter_config.json").is_file()
    last = math.inf if step is None else step
    rows = [row for row in read_metrics(run / "metrics.jsonl") if 0 < row["step"] <= last]
    lines = ["---", *_head(target, settings, base, is_adapter), "---", "", f"# {run.name}", ""]
    lines += [*_sentences(settings, rows, base, is_adapter), *filter(None, [note])]
    write_atomically(target / CARD, "\n".join(lines) + "\n")


def _settings(run: Path) -> Mapping[str, Any]:
    try:
        return read_toml(run / "config.toml")
    except ConfigError:  # a checkpoint may stand alone, and then the card says less
        return {}


def _head(target: Path, settings: Mapping[str, Any], base: str, is_adapter: bool) -> Iterator[str]:
    config = target / "config.json"
    has_value_head = config.is_file() and _CLASSIFIER in config.read_text(encoding="utf-8")
    yield f"base_model: {json.dumps(hub_name(base))}"
    if is_adapter:
        yield "base_model_relation: adapter"
    yield f"library_name: {'peft' if is_adapter else 'transformers'}"
    yield f"pipeline_tag: text-{'classification' if has_value_head else 'generation'}"
    recipe = [settings["recipe"]] if isinstance(settings.get("recipe"), str) else []
    yield f"tags: {json.dumps(['spmd-rl', *recipe])}"


def hub_name(folder: str) -> str:
    """Return the name of a model folder: of one in the cache of Hugging Face, that on the hub."""
    path = Path(folder)
    cached = path.parent.parent.name
    if path.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/", 1)
    return path.resolve().name


def _sentences(
    settings: Mapping[str, Any], rows: list[dict[str, Any]], base: str, is_adapter: bool
) -> Iterator[str]:
    what = "Adapters (LoRA) beside" if is_adapter else "Weights that began as"
    yield f"{what} `{hub_name(base)}`, trained by spmd-rl."
    yield ""
    for key in ("recipe", "data"):
        if value := settings.get(key):
            yield f"- {key}: `{value if isinstance(value, str) else json.dumps(value)}`"
    if rows:
        yield f"- steps: {rows[-1]['step']:,}"
        yield from _equal_bits(rows)
    yield ""


def _equal_bits(rows: list[dict[str, Any]]) -> Iterator[str]:
    compared, unequal = (sum(row.get(name) or 0 for row in rows) for name in (_COMPARED, _UNEQUAL))
    if compared:
        yield (
            f"- equal bits: of {compared:,.0f} tokens whose log-probs trainer and engine both "
            f"computed, {unequal:,.0f} differed"
        )

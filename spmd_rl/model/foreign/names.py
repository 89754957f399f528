"""Name of a model that says what computes it: `transformers:PATH`, or PATH for our own network."""

from __future__ import annotations

from pathlib import Path

PREFIX = "transformers:"
NOT_COMPARED = (
    "transformers computes the model, in the trainer and in the engine: their bits are not compared"
)


def is_foreign(model: str | Path) -> bool:
    """Return whether `transformers` computes the model of this name."""
    return str(model).startswith(PREFIX)


def folder_of(model: str | Path) -> Path:
    """Return the folder of a model, which may not be there."""
    return Path(str(model).removeprefix(PREFIX))


def named_like(model: str | Path, folder: Path) -> Path:
    """Return the name of a model in another folder, which the same network computes."""
    return Path(f"{PREFIX}{folder}") if is_foreign(model) else folder

"""Findings on a run: one sentence each, with a mood and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

Mood = Literal["good", "mixed", "bad", "flat", ""]

NOT_MOVING = "docs/hyperparameters.md#the-reward-does-not-move"
SOLVED = "docs/hyperparameters.md#prompts-that-are-solved"
_SIZES = ("prompts_per_step", "pairs_per_step")  # a recipe has one of them


class Finding(NamedTuple):
    """A sentence, and advice on it; advice on the run as a whole has no sentence.

    The mood is "good" for what improved, "mixed" where it fell again, "bad" for what asks for a
    look, "flat" for what did not change, and "" for what is neither.
    """

    mood: Mood
    text: str
    advice: tuple[str, ...] = ()


class Setup(NamedTuple):
    """What advice is made from beside the metrics: the settings by dotted key, and the folder."""

    settings: Mapping[str, Any]
    folder: Path

    def named(self, *keys: str) -> str:
        """Return the settings with their values; a key that the run does not have is left out."""
        known = [key for key in keys if self.settings.get(key) is not None]
        return ", ".join(f"{key} (now {_text(self.settings[key])})" for key in known)

    @property
    def slower(self) -> tuple[str, ...]:
        """Advice against too large steps; empty without a setting that makes them smaller."""
        rate, larger = self.named("trainer.lr"), self.named(*_SIZES)
        ways = [rate and f"divide {rate} by three", larger and f"raise {larger}"]
        said = ", or ".join(filter(None, ways))
        return (f"{said[0].upper()}{said[1:]}: {NOT_MOVING}",) if said else ()

    def checkpoint(self, step: int) -> str:
        """Return the path of the checkpoint after `step` steps in the folder; "" without one."""
        name = f"checkpoints/step_{step:06d}"
        return name if (self.folder / name).is_dir() else ""


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

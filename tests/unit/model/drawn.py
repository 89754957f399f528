"""Shared state of a model folder that is drawn at random."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Draw:
    """One folder: the generator, its config, and the keys and files that a refusal may name."""

    seed: int
    random: random.Random
    config: dict[str, Any] = field(default_factory=dict)
    suspects: set[str] = field(default_factory=set)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def suspect(self, *names: str) -> None:
        self.suspects |= set(names)


def write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=1))

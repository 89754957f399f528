"""What a folder drawn at random is made with."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Draw:
    """One folder: the generator, its config, and keys and files of which a refusal of it may
    complain.
    """

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

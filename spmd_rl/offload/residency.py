"""stand-in"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Receipt:
    num_bytes: dict[str, int] = field(default_factory=dict)
    copied_bytes: int = 0

"""A layer is said once: the names of its projections and its sizes stand in the rooms of layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.laws.source import PACKAGE

ROOMS = ("model/layers/", "model/families/", "kernels/")
# a program of SGLang's interpreter, which imports nothing of ours: it speaks of SGLang's modules
FOREIGN = ("microscope/foreign/sglang_dump.py",)
SAID_ONCE = re.compile(
    r"\b(?:[qkvo]_proj|gate_proj|up_proj|down_proj|intermediate_size|num_kv_heads|head_dim"
    r"|num_heads|expert_size|experts_per_token)\b"
)


def echoes(files: Mapping[str, str]) -> Iterator[str]:
    """Yield each line outside the rooms of layers that says what a layer says of itself."""
    for name, text in files.items():
        if name.startswith(ROOMS) or name in FOREIGN:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if found := SAID_ONCE.search(line):
                yield f"{name}:{number} says {found[0]}"


def test_no_other_room_knows_what_a_layer_consists_of() -> None:
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert list(echoes(files)) == []


def test_a_planted_echo_is_seen() -> None:
    planted = {
        "plan/sizes.py": "width = spec.num_heads * spec.head_dim\n",
        "train/names.py": 'if name.endswith("q_proj.weight"):\n',
        "model/layers/gqa.py": "head_dim: int\n",
        "model/pack.py": "def pack_projections(model): ...\n",
    }
    assert [one.partition(" ")[0] for one in echoes(planted)] == [
        "plan/sizes.py:1",
        "train/names.py:1",
    ]


def test_paths_are_there() -> None:
    assert all((Path(PACKAGE) / name).exists() for name in (*ROOMS, *FOREIGN))

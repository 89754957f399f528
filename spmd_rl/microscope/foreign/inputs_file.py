"""Inputs of a replay as a JSON file, from which a foreign program knows what to compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.observe.atomic_write import write_atomically


def write_inputs(case: ReplayCase, model: Path, path: Path) -> None:
    """Write the sequences of `case` and the folder of the weights."""
    sequences = [_sequence(sequence) for sequence in case.sequences]
    lines = ",\n  ".join(json.dumps(sequence) for sequence in sequences)
    folder = json.dumps(str(model.absolute()))
    write_atomically(path, f'{{\n "model": {folder},\n "sequences": [\n  {lines}\n ]\n}}\n')


def _sequence(sequence: ReplaySequence) -> dict[str, Any]:
    return {
        "name": sequence.name,
        "num_prompt_tokens": len(sequence.prompt),
        "temperature": sequence.temperature,
        "tokens": sequence.tokens.tolist(),
    }

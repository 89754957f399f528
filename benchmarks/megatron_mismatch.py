"""Distance between a Megatron-core trainer's log-probs and the native engine's, by layout.

    python -m benchmarks.megatron_mismatch [--save]

A random model scores tokens that the engine decoded, under the same weights, in float32 and in
bfloat16. Rows have the tokens whose bits differ, and the mean and the largest difference of a
log-prob. A layout that cuts no sum holds if no token differs; another one, if the largest
difference is what the dtype can round. Several ranks share the cores of one machine, over gloo.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.record import finish, measured
from benchmarks.table import Row
from tests.backends.engine_scores import engine_scores
from tests.backends.megatron_case import write_model
from tests.backends.score_cases import ScoreCase, Scored, score_on
from tests.dist.train_case import make_batch

MODEL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
BATCH = {"num_groups": 16, "longest": 40}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEQUENCE_PARALLEL = {"sequence_parallel": True}
LAYOUTS = {  # ranks, axes, settings of the backend
    "one rank": (1, {}, {}),
    "pp 2": (2, {"pp": 2}, {}),
    "tp 2": (2, {"tp": 2}, {}),
    "tp 2, sequence parallel": (2, {"tp": 2}, SEQUENCE_PARALLEL),
    "cp 2": (2, {"cp": 2}, {}),
}
EXACT = ("one rank", "pp 2")
MOST = {"float32": 1e-4, "bfloat16": 0.5}  # nats


def scored(folder: Path, work: Path) -> dict[str, Scored]:
    """Return what the trainer of each layout and dtype finds."""
    found: dict[str, Scored] = {}
    for num_ranks in (1, 2):
        cases = {
            f"{layout}, {dtype}": ScoreCase(str(folder), split, backend, {"dtype": dtype})
            for layout, (size, split, backend) in LAYOUTS.items()
            for dtype in DTYPES
            if size == num_ranks
        }
        found |= score_on(num_ranks, cases, work / str(num_ranks), **BATCH)
    return found


def rows_of(layout: str, dtype: str, found: Tensor, engine: Tensor) -> Iterator[Row]:
    name, distance = f"{layout}, {dtype}", (found - engine).abs()
    num_unequal = int((found != engine).sum())
    is_exact = layout in EXACT
    what = f"{name}: unequal of {len(engine)}"
    yield measured(what, num_unequal, "tokens", at_most=0 if is_exact else None)
    yield measured(f"{name}: mean abs(dlogp)", float(distance.mean()), "nats")
    most = None if is_exact else MOST[dtype]
    yield measured(f"{name}: largest abs(dlogp)", float(distance.max()), "nats", at_most=most)


def main(words: list[str]) -> int:
    rows: list[Row] = []
    batch = make_batch(**BATCH)
    mask = torch.from_numpy(batch.mask)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary) / "model", "qwen3", std=0.06, **MODEL)
        found = scored(folder, Path(temporary))
        for dtype, torch_dtype in DTYPES.items():
            engine = engine_scores(folder, batch, torch_dtype)[mask]
            for layout in LAYOUTS:
                rows += rows_of(layout, dtype, found[f"{layout}, {dtype}"].scores[mask], engine)
    return finish(__file__, ("torch", "megatron-core"), rows, save="--save" in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

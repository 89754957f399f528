"""The benchmark of algorithms has a run for each, and tells learning from standing still."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import algorithms
from spmd_rl.algo.make import ALGORITHMS
from spmd_rl.config.load import load
from spmd_rl.recipes import grpo


def test_every_algorithm_is_run_with_settings_that_it_reads() -> None:
    assert {name.partition(",")[0] for name in algorithms.VARIANTS} == set(ALGORITHMS)
    for name, own in algorithms.VARIANTS.items():
        words = [word for word in algorithms.common_words(Path("m"), 3) if "nproc" not in word]
        load(grpo.Config, None, [*words, *own, f"--algorithm={name.partition(',')[0]}"])


def test_a_run_that_does_not_learn_misses_its_bar(tmp_path: Path) -> None:
    flat, rising = [0.4] * 12, [0.4, *[0.7] * 11]
    lines = [json.dumps({"step": 0}), *(json.dumps({"step": 1, "reward/mean": 0.4}),)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert algorithms.rewards_of(tmp_path) == [0.4]
    rows = [*algorithms.rows_of("grpo", [flat, rising], [0, 1])]
    assert [row.holds for row in rows] == [None, False, None, True]

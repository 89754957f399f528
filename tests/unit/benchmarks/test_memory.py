"""The cases of benchmarks/memory.py fit the machines that run them, and their packs are full."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import memory
from benchmarks.record import compared
from benchmarks.shapes import write_config
from spmd_rl.config.load import load
from spmd_rl.plan.resolve import resolve
from spmd_rl.recipes.grpo import Config

GIB = 1 << 30


@pytest.mark.parametrize("name", memory.CASES)
def test_a_case_fits_an_h100_and_fills_its_packs(tmp_path: Path, name: str) -> None:
    case = memory.CASES[name]
    write_config(case.shape, tmp_path / "models" / case.shape)
    cfg = load(Config, None, memory.settings(name, tmp_path))
    plan = resolve(cfg, case.num_ranks, 79 * GIB)
    plan.require(79 * GIB)
    plan.require_host(110 * GIB, case.num_ranks)
    assert set(memory.PHASES) <= set(plan.ledgers[0].phases)
    length = memory.PROMPT_TOKENS + memory.ANSWER_TOKENS
    assert cfg.trainer.max_tokens % length == 0
    ranks = plan.placements.train.size
    tokens = cfg.prompts_per_step * cfg.sampling.num_samples * length // ranks
    assert tokens % cfg.trainer.max_tokens == 0
    assert tokens >= 2 * cfg.trainer.max_tokens, "gradients of the first pack are there at the next"


def test_prompts_are_of_one_length(tmp_path: Path) -> None:
    memory.write_prompts(tmp_path / "prompts.jsonl", 5)
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines()
    assert len(set(lines)) == 5
    assert {len(line) for line in lines} == {len(lines[0])}


@pytest.mark.parametrize(("value", "holds"), [(94, False), (95, True), (105, True), (106, False)])
def test_a_ratio_has_two_bars(value: float, holds: bool) -> None:
    row = compared("x", value, "GiB", peer="y", peer_value=100, at_least=0.95, at_most=1.05)
    assert (row.bar, row.holds) == (">= 0.95x and <= 1.05x", holds)

"""Equal work on both sides of the comparison with TRL."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.grpo_step import work
from benchmarks.laptop_vs_trl import _check_equal
from spmd_rl.model.hf import read_weights


@pytest.mark.parametrize("size", work.SIZES)
def test_a_size_is_what_its_name_says(size: work.Size, tmp_path: Path) -> None:
    num_parameters = work.write_model(size, tmp_path)
    assert num_parameters == pytest.approx(float(size.millions) * 1e6, rel=0.02)
    assert sum(tensor.numel() for _, tensor in read_weights(tmp_path / "model")) == num_parameters


def test_the_given_completions_are_those_of_one_step() -> None:
    given = np.array(work.given_completions())
    assert given.shape == (work.PROMPTS, work.GROUP, work.NEW_TOKENS)
    assert given.min() >= 2
    assert (given == np.array(work.given_completions())).all()


def test_prompts_last_for_any_run(tmp_path: Path) -> None:
    work.write_prompts(tmp_path / "p.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len(rows) == work.NUM_ROWS
    assert rows[0] == rows[810]


def test_unequal_work_is_refused() -> None:
    ours = {"generated_tokens": 8, "gradient_tokens": 8, "prompt_tokens": 6, "grad_norm": 1.0}
    _check_equal(ours, ours | {"grad_norm": 1.0005})
    for change in ({"gradient_tokens": 7}, {"grad_norm": 1.01}):
        with pytest.raises(SystemExit, match="unequal work"):
            _check_equal(ours, ours | change)

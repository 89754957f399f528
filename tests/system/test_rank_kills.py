"""Two ranks of GRPO, of which one is killed in each phase; all roles share both, in turn."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from tests.system.kill_resume import EXAMPLE, SMALL, Outcome, Run, differences
from tests.system.mortal_recipe import PLACES, PLACES_OF_EXPERTS, STRUCK, Config

WORDS = ["tests.system.mortal_recipe", "--nproc=2", "--offload.sleep=always", *SMALL]
NUM_PAGES = "--engine.num_pages=256"


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


def killed(folder: Path, phase: str, rank: int, more: Sequence[str] = ()) -> Outcome:
    """Have a rank killed in a phase, and return what the same command then ends with."""
    words = [*WORDS, NUM_PAGES, *more, f"--dies_in={phase}", f"--victim={rank}"]
    run = Run(folder, words, name=phase)
    code = run.start()
    assert (code, (run.folder / STRUCK).exists()) == (1, True), run.output
    sentence = run.output.strip().splitlines()[-1]
    assert re.search(rf"lost rank {rank} |rank {rank} was killed by SIGKILL", sentence), sentence
    outcome = run.finish()
    assert "resuming at step" in run.output
    return outcome


@pytest.mark.system
def test_a_rank_killed_in_any_phase_is_named_and_changes_no_bit(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(Run(tmp_path, [*WORDS, NUM_PAGES], name="whole").finish)
        ended = [
            pool.submit(killed, tmp_path, phase, number % 2) for number, phase in enumerate(PLACES)
        ]
        assert [differences(whole.result(), one.result()) for one in ended] == [[]] * len(PLACES)


@pytest.mark.system
@pytest.mark.parametrize(
    ("phases", "split"),
    [
        (PLACES_OF_EXPERTS, ["--split.train.ep=2"]),
        # the engines of both ranks share experts too: rows of prompts are on their way, or a push
        ([*PLACES_OF_EXPERTS, "sync"], ["--split.train.ep=2", "--split.infer.ep=2"]),
    ],
    ids=["trainer", "engines"],
)
def test_a_rank_killed_among_its_experts_rows_is_named_and_changes_no_bit(
    tmp_path: Path, phases: Sequence[str], split: list[str]
) -> None:
    """The other rank waits for rows that never come, and is ended."""
    model = tmp_path / "mixture"
    shutil.copytree(EXAMPLE / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | EXPERTS))
    more = [f"--model={model}", *split, "--engine.load_weights=false"]
    whole = Run(tmp_path, [*WORDS, NUM_PAGES, *more], name="whole").finish()
    for number, phase in enumerate(phases):
        assert differences(whole, killed(tmp_path, phase, number % 2, more)) == []


@pytest.mark.parametrize("phase", PLACES | PLACES_OF_EXPERTS)
def test_there_is_a_place_to_die_in_each_phase(phase: str) -> None:
    module, name = (PLACES | PLACES_OF_EXPERTS)[phase]
    assert callable(attrgetter(name)(importlib.import_module(module)))
    assert {*get_args(get_type_hints(Config)["dies_in"])} == {"", *PLACES, *PLACES_OF_EXPERTS}

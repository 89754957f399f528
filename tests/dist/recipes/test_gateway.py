"""Episodes over HTTP train as those in process do: the same tokens, the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.recipes.conftest import Ended
from tests.dist.recipes.test_examples import CALCULATES, pupil

pytest.importorskip("uvicorn", reason="the extra 'agents' is not installed")

pytestmark = pytest.mark.dist
EPISODES = Path(__file__).with_name("over_http.py")
CLOCKS = ("before/", "engine/", "perf/", "time/", "rollout/tokens_per_s", "unix_s")
SAMPLES = ("tokens", "logprobs", "versions", "text", "reward", "status")


def test_http_costs_no_bits(run: Any) -> None:
    model = pupil(run, "--steps=40", "--trainer.total_steps=40", "--pairs_per_step=64")
    words = (f"--model={model}", "--steps=2", "--prompts_per_step=8")

    def trained(*more: str, name: str) -> Ended:
        ended: Ended = run("grpo", *CALCULATES, *words, *more, name=name, small=False)
        assert ended.code == 0, ended.sentence
        return ended

    inside, over_http = (
        trained(f"--hooks.generate={EPISODES}:{function}", name=function)
        for function in ("solve", "CalculatorOverHttp")
    )
    for step in (1, 2):
        for one, other in zip(inside.samples(step), over_http.samples(step), strict=True):
            assert [one[key] for key in SAMPLES] == [other[key] for key in SAMPLES]
    for ours, theirs in zip(inside.metrics, over_http.metrics, strict=True):
        assert ours["onpolicy/mismatched_tokens"] == 0
        assert theirs.pop("hook/rewritten_turns") == 0
        assert ours.keys() == theirs.keys()
        changed = [key for key in ours if ours[key] != theirs[key]]
        assert all(key.startswith(CLOCKS) for key in changed), changed

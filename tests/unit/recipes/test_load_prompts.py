"""Prompts of a recipe: what the config says of data and hooks."""

from __future__ import annotations

import json
from pathlib import Path

from spmd_rl.hooks.config import HookConfig
from spmd_rl.recipes import collect
from spmd_rl.recipes.load_prompts import load_prompts

MODEL = Path(__file__).parents[3] / "examples/arithmetic/model"


def test_the_weights_of_a_step_are_those_of_the_hook(tmp_path: Path) -> None:
    data = {}
    for name in ("easy", "hard"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps([{"prompt": f"{n}+1=", "answer": "0"} for n in range(5)]))
        data[str(path)] = 1.0
    hook = tmp_path / "hooks.py"
    hook.write_text("def pick(step, sources):\n    return {sources[step % 2]: 1}\n")
    cfg = collect.Config(
        model=str(MODEL),
        data=data,
        prompts_per_step=3,
        hooks=HookConfig(pick_sources=f"{hook}:pick"),
    )
    sources = [prompt.source for prompt in load_prompts(cfg).take(9)]
    assert sources == ["easy"] * 3 + ["hard"] * 3 + ["easy"] * 3

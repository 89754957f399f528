"""Where `rlhf` reads its reward model: where the chat template of that model ends an answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spmd_rl.config.load import load
from spmd_rl.recipes import rlhf
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from tests.dist.train_case import write_model_folder
from tests.unit.data.chat_templates import CHATML, QWEN, tokenizer_of


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A policy and a reward model with another template."""
    made = tmp_path / "policy", tmp_path / "judge"
    for folder, template in zip(made, (QWEN, CHATML), strict=True):
        write_model_folder(folder)
        tokenizer_of(template).save_pretrained(str(folder))
    return made


def config(folders: tuple[Path, Path], *words: str) -> rlhf.Config:
    policy, judge = folders
    return load(
        rlhf.Config, overrides=[f"model={policy}", f"reward_model={judge}", "data=d", *words]
    )


def test_samples_are_scored_with_the_line_break_of_the_template(
    folders: tuple[Path, Path],
) -> None:
    tokenizer = tokenizer_of(CHATML)
    end = rlhf.answer_end(config(folders, "prompts.chat_template=true"))
    assert end is not None
    (drawn,) = tokenizer(["the hat<|end|>"], add_special_tokens=False)["input_ids"]
    tokens = np.array(drawn, np.int32)
    sample = Sample(
        0, 0, tokens, np.zeros(len(tokens), np.float32), np.zeros_like(tokens), "completed"
    )
    asked = Prompt(0, np.array([5, 6], np.int32), chat={"messages": []})
    scored: list[Batch] = []

    def rewards(batch: Batch) -> Any:
        scored.append(batch)
        return SimpleNamespace(values=np.array([0.75]))

    judge: Any = SimpleNamespace(rewards=SimpleNamespace(call=rewards))
    (group,) = rlhf.graded(judge, end, [Group(asked, [sample])])
    assert tokenizer.decode(scored[0].tokens[2:]) == "the hat<|end|>\n"
    assert group.samples[0].reward == 0.75
    assert group.samples[0].tokens.tolist() == drawn, "the policy learns what the engine drew"


def test_a_reward_model_without_a_tokenizer_has_the_policys(folders: tuple[Path, Path]) -> None:
    cfg = config(folders, "prompts.chat_template=true")
    own = rlhf.answer_end(cfg)
    for file in folders[1].glob("tokenizer*"):
        file.unlink()
    assert rlhf.answer_end(cfg) == own


def test_without_templates_nothing_is_added(folders: tuple[Path, Path]) -> None:
    assert rlhf.answer_end(config(folders)) is None

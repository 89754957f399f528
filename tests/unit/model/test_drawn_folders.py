"""Folders with random settings give transformers' logits and ids, or a refusal with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmd_rl.errors import ConfigError
from spmd_rl.kernels import PackedAttention
from spmd_rl.model import hf, read, rope_spec, tokenizer, weight_files
from spmd_rl.model.hf import load_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.model.tokenizer import FolderTokenizer, light_tokenizer, load_tokenizer
from tests.unit.model.drawn_folders import POSITIONS, draw_folder
from tests.unit.model.drawn_tokenizers import draw_tokenizer

NUM_FOLDERS = 100
TOKENS = torch.arange(POSITIONS) * 37 % 251
TEXTS = [
    "hello world 1212",
    "He<think>ll <|im_end|>o",
    "",
    "  é\n\n12 <|pad|><|more|><|mask|><|new|>",
    "<|bos|>x" * 9,
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)


def _logits(folder: Path) -> torch.Tensor:
    model = CausalLM(read_spec(folder))
    load_weights(model, folder)
    lengths = np.array([POSITIONS], dtype=np.int32)
    attend = PackedAttention(lengths, device=torch.device("cpu"))
    return model(TOKENS, torch.arange(POSITIONS), attend, torch.arange(POSITIONS))


def _their_logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(TOKENS[None]).logits[0]


def _ids(one: Any) -> list[Any]:
    """Return ids with and without special tokens, the texts of them, and the end of text."""
    ids = [one(TEXTS, add_special_tokens=special)["input_ids"] for special in (True, False)]
    texts = [one.decode(row, skip_special_tokens=skip) for row in ids[0] for skip in (True, False)]
    return [ids, texts, one.eos_token_id]


def judge(
    ours: Callable[[], Any], theirs: Callable[[], Any], same: Callable[[Any, Any], bool]
) -> str:
    try:
        result = ours()
    except ConfigError as error:
        return f"refused: {error}"
    try:
        expected = theirs()
    except Exception as error:
        return f"accepted, and transformers refuses it: {error!r}"
    return "same" if same(result, expected) else "different"


def judge_model(seed: int, folder: Path) -> str:
    """Return `same`, `refused` with a sentence that names a drawn key, or what is wrong."""
    draw = draw_folder(seed, folder)
    with torch.no_grad():
        verdict = judge(lambda: _logits(folder), lambda: _their_logits(folder), _close)
    if (
        verdict.startswith("refused")
        and "\n" not in verdict
        and any(one in verdict for one in draw.suspects)
    ):
        return "refused"
    return verdict


def judge_tokenizer(seed: int, folder: Path) -> str:
    draw_tokenizer(seed, folder)
    return judge(
        lambda: _ids(load_tokenizer(folder)),
        lambda: _ids(AutoTokenizer.from_pretrained(folder)),
        list.__eq__,
    )


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool(torch.isfinite(ours).all()) and torch.allclose(ours, theirs, rtol=2e-4, atol=2e-4)


def _count(one: Callable[[int, Path], str], tmp_path: Path) -> tuple[Counter[str], dict[int, str]]:
    """Count each verdict, and collect those that no folder may have."""
    verdicts = {seed: one(seed, tmp_path / str(seed)) for seed in range(NUM_FOLDERS)}
    wrong = {
        seed: verdict for seed, verdict in verdicts.items() if verdict not in ("same", "refused")
    }
    return Counter(verdicts.values()), wrong


def test_logits_are_those_of_transformers_or_refused(tmp_path: Path) -> None:
    counts, wrong = _count(judge_model, tmp_path)
    assert not wrong
    assert counts["same"] >= 40 and counts["refused"] >= 20


def _never_truncate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        read,
        "rope_spec",
        lambda config, size: replace(rope_spec.rope_spec(config, size), truncate=True),
    )


def _index_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weight_files, "SINGLE", weight_files.INDEX.removesuffix(".index.json") + ".other")


def _drop_the_head(patch: pytest.MonkeyPatch) -> None:
    def without(folder: Path, shapes: dict[str, Any]) -> dict[str, Any]:
        return {
            name: one
            for name, one in weight_files.stored_weights(folder, shapes).items()
            if name in shapes
        }

    patch.setattr(hf, "stored_weights", without)


@pytest.mark.parametrize("fault", [_never_truncate, _index_first, _drop_the_head])
def test_a_fault_of_reading_a_model_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert "different" in (judge_model(seed, tmp_path / str(seed)) for seed in range(NUM_FOLDERS))


def test_token_ids_are_those_of_transformers(tmp_path: Path) -> None:
    counts, wrong = _count(judge_tokenizer, tmp_path)
    assert not wrong
    assert counts["same"] == NUM_FOLDERS
    light = sum(light_tokenizer(tmp_path / str(seed)) is not None for seed in range(NUM_FOLDERS))
    assert light >= 30


def _keep_padding(patch: pytest.MonkeyPatch) -> None:
    def keep(self: FolderTokenizer, folder: Path, rust: Any, config: dict[str, Any]) -> None:
        self.folder, self._rust, self._config = folder, rust, config

    patch.setattr(FolderTokenizer, "__init__", keep)


def _always_as_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tokenizer, "is_as_written", lambda *words: True)


@pytest.mark.parametrize("fault", [_keep_padding, _always_as_written])
def test_a_fault_of_reading_a_tokenizer_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert "different" in (
        judge_tokenizer(seed, tmp_path / str(seed)) for seed in range(NUM_FOLDERS)
    )

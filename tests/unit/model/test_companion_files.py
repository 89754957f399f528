"""An exported folder has every file of the model folder but weights and what is about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from spmd_rl.errors import ConfigError
from spmd_rl.model.companion_files import MODEL_FILES, TOKENIZER_FILES, copy_files
from spmd_rl.model.hf import random_weights, save_folder
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.peft_folder import save_adapters
from spmd_rl.model.read import read_spec
from tests.dist.train_case import write_model_folder
from tests.unit.data.chat_templates import CHATML, LLAMA, tokenizer_of

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
FILES = {
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.model.v3"),
    *("spiece.model", "sentencepiece.bpe.model", "qwen.tiktoken", "tekken.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja"),
    "additional_chat_templates/rag.jinja",
}
OTHERS = {"model.safetensors", "model.safetensors.index.json", "README.md", "trainer_state.json"}


def _files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("patterns", "more"),
    [(TOKENIZER_FILES, set()), (MODEL_FILES, {"config.json", "generation_config.json"})],
    ids=["adapters", "model"],
)
def test_each_file_of_the_tokenizer_is_copied(
    patterns: tuple[str, ...], more: set[str], tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    (source / "tokenizers.d").mkdir()  # a folder that has a name like a file's
    target.mkdir()
    for name in FILES | OTHERS | {"config.json", "generation_config.json"}:
        (source / name).write_text(name)
    copy_files(source, target, patterns)
    assert _files(target) == FILES | more
    assert all((target / name).read_text() == name for name in FILES)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "additional_chat_templates"])
@pytest.mark.parametrize("steps", [1, 2])
def test_no_link_leads_out_of_the_folder(tmp_path: Path, name: str, steps: int) -> None:
    source, target, ours = tmp_path / "source", tmp_path / "target", tmp_path / "ours"
    for folder in (source, target, ours):
        folder.mkdir()
    (ours / "a.jinja").write_text("private")
    private = ours if name.startswith("additional") else ours / "a.jinja"
    (source / "between").symlink_to(private)
    (source / name).symlink_to(private if steps == 1 else "between")
    with pytest.raises(ConfigError, match=f"{name}.* is a link to a file outside"):
        copy_files(source, target, MODEL_FILES)
    assert _files(target) == set()


def test_links_within_the_folder_and_its_cache_are_followed(tmp_path: Path) -> None:
    """Such is a snapshot in the cache of Hugging Face."""
    snapshot, target = tmp_path / "models--a--b/snapshots/abc", tmp_path / "target"
    for folder in (snapshot, target, blobs := tmp_path / "models--a--b/blobs"):
        folder.mkdir(parents=True)
    (blobs / "1").write_text("of the cache")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    (snapshot / "vocab.json").write_text("of the folder")
    (snapshot / "vocab.txt").symlink_to("vocab.json")
    (tmp_path / "linked").symlink_to(snapshot)
    copy_files(tmp_path / "linked", target, MODEL_FILES)
    assert (target / "tokenizer.json").read_text() == "of the cache"
    assert (target / "vocab.txt").read_text() == "of the folder"
    (tmp_path / "private").write_text("private")
    (blobs / "2").symlink_to(tmp_path / "private")
    (snapshot / "merges.txt").symlink_to("../../blobs/2")
    with pytest.raises(ConfigError, match=r"merges.txt is a link"):
        copy_files(snapshot, target, MODEL_FILES)


def _with_templates(folder: Path) -> Any:
    """Write a model folder with a template for tools beside the default one."""
    write_model_folder(folder)
    tokenizer = tokenizer_of(CHATML)
    tokenizer.save_pretrained(str(folder))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text(CHATML)
    (folder / "chat_template.jinja").write_text(LLAMA)
    return AutoTokenizer.from_pretrained(folder)


def test_an_export_renders_tools_as_the_folder_does(tmp_path: Path) -> None:
    before = _with_templates(tmp_path / "model")
    spec = read_spec(tmp_path / "model")
    save_folder(tmp_path / "hf", tmp_path / "model", random_weights(spec, 0))
    lora = LoraConfig(rank=2)
    zeros = ((name, torch.zeros(shape)) for name, shape in lora.shapes(spec).items())
    save_adapters(tmp_path / "adapter", tmp_path / "model", lora, zeros)
    messages = [{"role": "user", "content": "abc"}]
    for name in ("hf", "adapter"):
        after = AutoTokenizer.from_pretrained(tmp_path / name)
        for tools in (None, [TOOL]):
            texts = [
                one.apply_chat_template(messages, tools=tools, tokenize=False)
                for one in (before, after)
            ]
            assert texts[0] == texts[1]
            assert (json.dumps("add") in texts[0]) == bool(tools)

"""The light tokenizer equals transformers' own on the same folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spmd_rl.errors import ConfigError
from spmd_rl.model.tokenizer import light_tokenizer, load_tokenizer

EXAMPLE = Path(__file__).parents[3] / "examples/arithmetic/model"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vocab = {
        token: i
        for i, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *"0123456789+-= abc<>"])
    }
    rust = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    rust.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
    PreTrainedTokenizerFast(
        tokenizer_object=rust,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        chat_template=TEMPLATE,
    ).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_same_ids_and_text(folder: Path, add_special_tokens: bool) -> None:
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    texts = ["1+2=3", "a b c", "", "zz9", "<eos>1"]
    ids = ours(texts, add_special_tokens=add_special_tokens)["input_ids"]
    assert ids == theirs(texts, add_special_tokens=add_special_tokens)["input_ids"]
    for skip in (True, False):
        for row in ids:
            assert ours.decode(row, skip_special_tokens=skip) == theirs.decode(
                row, skip_special_tokens=skip
            )
    assert ours.eos_token_id == theirs.eos_token_id == 1


NAMED = "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
CHATS: list[tuple[object, dict[str, object]]] = [
    (TEMPLATE, {"add_generation_prompt": True}),
    (TEMPLATE, {}),
    (NAMED, {}),
    (NAMED, {"bos_token": "other"}),
    (TOOLS, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    (TOOLS, {"tools": None}),
    ("{{ sep_token }}{{ messages[0].content }}", {}),  # the config lacks it
    ("{{ strftime_now('%Y') }}{{ greeting }}", {"greeting": "ho"}),
]


@pytest.mark.parametrize(("template", "given"), CHATS)
def test_chats_are_rendered_as_transformers_renders_them(
    folder: Path, template: str, given: dict[str, object]
) -> None:
    (folder / "chat_template.jinja").write_text(template)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "b", "content": "1"}, {"role": "c", "content": "2"}]
    text = ours.apply_chat_template(chat, tokenize=False, **given)
    assert text == theirs.apply_chat_template(chat, tokenize=False, **given)


def test_one_of_several_templates_is_for_tools(folder: Path) -> None:
    named = folder / "additional_chat_templates"
    named.mkdir()
    (folder / "chat_template.jinja").write_text("plain")
    (named / "tool_use.jinja").write_text("with tools")
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "b", "content": "1"}]
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        text = ours.apply_chat_template(chat, tokenize=False, tools=tools)
        assert text == theirs.apply_chat_template(chat, tokenize=False, tools=tools)


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages[9].role.x }}"])
def test_a_template_that_refuses_raises_the_same(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for tokenizer in (ours, theirs):
        with pytest.raises(TemplateError):
            tokenizer.apply_chat_template([{"role": "b", "content": "1"}], tokenize=False)


def test_without_a_template_it_says_so(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="chat_template is not set"):
        load_tokenizer(folder).apply_chat_template([{"role": "b", "content": "1"}], tokenize=False)


@pytest.mark.parametrize("padding", [True, "max_length"])
def test_saved_truncation_and_padding_are_not_applied(folder: Path, padding: bool | str) -> None:
    saved = AutoTokenizer.from_pretrained(folder)
    saved(["1", "1+2=3+4"], padding=padding, truncation=True, max_length=5)
    saved.save_pretrained(folder)
    kept = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert kept.padding and kept.truncation, "the file keeps what the call set"
    ids = load_tokenizer(folder)(["1", "1+2=3+4"])["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(folder)(["1", "1+2=3+4"])["input_ids"]
    assert [len(row) for row in ids] == [2, 8]


def test_a_config_of_other_types_is_left_to_transformers(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": 3}))
    assert light_tokenizer(folder) is None


def test_broken_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model folder"):
        load_tokenizer(tmp_path / "nothing")
    (folder / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(ConfigError, match="does not load"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        ConfigError, match="holds no tokenizer: there is no tokenizer.json, nor any other file"
    ):
        load_tokenizer(folder)
    shutil.copy(EXAMPLE / "config.json", folder)
    (folder / "vocab.json").write_text("{")
    with pytest.raises(ConfigError, match="no tokenizer that loads"):
        load_tokenizer(folder)

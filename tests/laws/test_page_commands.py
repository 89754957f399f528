"""Every command of `spmd-rl` on a page is one that the program takes: its flags, keys and values.

Each is given to the program itself, in a folder that has what the command names: a model, data and
reward functions. A run is checked up to the launch of its ranks. What works on the folder of a run
that is not there ends with the sentence that says so.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from examples.instructions.make_model import SMOLLM2_135M
from spmd_rl.check import command as check_command
from spmd_rl.cli import command
from spmd_rl.cli.exit_code import run_guarded
from spmd_rl.cli.main import dispatch
from spmd_rl.microscope import command as mismatch_command
from spmd_rl.model.foreign.names import folder_of
from spmd_rl.model.hf import random_weights
from spmd_rl.model.read import read_spec
from spmd_rl.observe.provenance import START_TIME_ENV
from tests.laws.source import ROOT

MODEL = ROOT / "examples/arithmetic/model"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
PLACEHOLDERS = {"RECIPE": "grpo", "G": "80", "STEP": "3", "FILE": "train.jsonl"}
WITH_RECIPE = ("run", "plan", "submit", "check", "eval")
NEEDED = {"replay": {"recorded": "runs/grpo"}, "rlhf": {"reward_model": "PATH"}}
MODEL_KEYS = ("model", "reward_model", "teacher", "trainer.lora.folder")
SAMPLE = {
    "prompt": "1+1=",
    "question": "1+1=",
    "answer": "2",
    "chosen": "2",
    "rejected": "3",
    "text": "1+1=2",
    "messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}],
    "contents": [{"role": role, "parts": [{"text": "2"}]} for role in ("user", "model")],
    "instruction_id_list": ["keywords:existence"],
    "kwargs": [{"keywords": ["2"]}],
}
SMOLLM2 = SMOLLM2_135M | {"max_position_embeddings": 8192, "tie_word_embeddings": True}
CONTEXT = 4096  # tokens, as many as the settings of the pages need
TEMPLATE = "{% for one in messages %}{{ one.content }}{% endfor %}"
_CONTINUED = re.compile(r"\s*\\\n\s*")
_PROGRAM = r"(?:spmd-rl|(?:torchrun |srun )?[^`|]*-m spmd_rl)"
_LINE = re.compile(rf"^(?:    |\$ )*({_PROGRAM} .*)$")
_INLINE = re.compile(rf"`({_PROGRAM} [^`]+)`")
_TOML = re.compile(r"^```toml\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# what is said where there is no folder of a run, no program of SGLang, or no value head
NOT_THERE = re.compile(r"\b(runs/\S+|RUN)\b|is no reward model|has no experts to share|sglang")


def commands(page: str) -> Iterator[str]:
    """Yield the commands of a page: lines of its blocks, and inline code."""
    in_block = False
    for line in _CONTINUED.sub(" ", page).splitlines():
        if line.startswith("```"):
            in_block = not in_block
        elif found := (in_block or line.startswith("    ")) and _LINE.match(line):
            yield re.split(r"\s{2,}| +#", found[1])[0]
        elif not in_block:
            yield from _INLINE.findall(line)


def words_of(said: str) -> list[str]:
    """Return the words of a command after the program; a recipe that is left out is grpo."""
    words = shlex.split(re.sub(r"\[[^]'\"]*\]|\.\.\.| \(or .*", " ", said))
    start = words.index("spmd_rl") if "spmd_rl" in words else 0
    name, *rest = (PLACEHOLDERS.get(word, word) for word in words[start + 1 :])
    if name in WITH_RECIPE and name != "eval" and rest[:1] and rest[0].startswith("-"):
        rest.insert(0, "grpo")
    return [name, *rest]


def all_commands() -> list[tuple[str, str]]:
    """Return each command once, with its page; one without arguments is only mentioned."""
    found = {
        said: page.relative_to(ROOT).as_posix()
        for page in PAGES
        for said in commands(page.read_text(encoding="utf-8"))
    }
    return [(page, said) for said, page in found.items() if len(words_of(said)) > 1]


def settings(words: list[str]) -> dict[str, Any]:
    """Return the settings of a command and of the TOML file that it names, nested as in a file."""
    flags: dict[str, Any] = {}
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            key, equals, text = word.removeprefix("--").partition("=")
            flags[key] = text if equals else value
    config = Path(flags.get("config", ""))
    in_file = tomllib.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    evaluated = in_file.get("eval", {})
    return in_file | {"eval.data": evaluated.get("data", "")} | flags


def provide(words: list[str], page: str, folder: Path) -> list[str]:
    """Make what a command names in `folder`, and return its words with what it leaves out."""
    (folder / "examples").symlink_to(ROOT / "examples")
    given = settings(words)
    if "config" in given and not Path(given["config"]).is_file():
        blocks = _TOML.findall((ROOT / page).read_text(encoding="utf-8"))
        whole = next((block for block in blocks if block.startswith("model =")), "")
        file = folder / given["config"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(whole)
        given = settings(words)
    if words[0] in WITH_RECIPE and words[1:]:
        needed = {"model": "PATH", "data": "train.jsonl", **NEEDED.get(words[1], {})}
        needed |= {"world": "2"} if words[0] == "plan" and "fewest-gpus" not in given else {}
        missing = {key: value for key, value in needed.items() if not given.get(key)}
        words = [*words, *(f"--{key}={value}" for key, value in missing.items())]
        given |= missing
    for key in MODEL_KEYS:
        if name := given.get(key):
            make_model(folder / folder_of(name))
    for name in (given.get("data"), given.get("eval.data"), *words[2:3]):
        if isinstance(name, str) and name:
            make_data(folder / name.partition("@")[0])
    make_reward(str(given.get("reward", "")), folder)
    for recipe in ("mine.py", "my_recipe.py"):
        shutil.copy(ROOT / "spmd_rl/recipes/grpo.py", folder / recipe)
    return words


def make_model(folder: Path) -> None:
    """Make a model with weights and a chat template."""
    if folder.exists():
        return
    shutil.copytree(MODEL, folder)
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    config |= {"max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(random_weights(read_spec(folder), 0)), folder / "model.safetensors")
    file = folder / "tokenizer_config.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(tokenizer | {"chat_template": TEMPLATE}))


def make_data(path: Path) -> None:
    """Make a file of records with the keys of all recipes, in the format of its name."""
    if path.exists() or path.suffix not in (".jsonl", ".csv", ".parquet"):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").Table.from_pylist([SAMPLE] * 4)
        parquet.write_table(table, path)
    elif path.suffix == ".csv":
        path.write_text("prompt,answer\n1+1=,2\n")
    else:
        path.write_text(f"{json.dumps(SAMPLE)}\n" * 4)


def make_reward(name: str, folder: Path) -> None:
    """Make the reward function that a command names by file or module."""
    where, colon, function = name.rpartition(":")
    file = folder / (where if where.endswith(".py") else f"{where}.py")
    if colon and not file.exists():
        file.write_text(f"def {function}(prompt, sample):\n    return 1.0\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to an empty folder, in which no ranks start, no host or package is looked at, nothing is
    replayed.
    """
    monkeypatch.setattr(command, "check_packages", lambda trainer: None)
    monkeypatch.setattr(command, "launch", lambda *_: 0)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(check_command, "check_host", lambda *_: [])
    monkeypatch.setattr(mismatch_command, "_compare", lambda *_: 0)
    monkeypatch.setenv(START_TIME_ENV, "")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "said"), all_commands(), ids=[said for _, said in all_commands()])
def test_a_command_of_a_page_is_taken(
    page: str, said: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = provide(words_of(said), page, folder)
    if words[0] == "submit":
        words.append("--dry-run")
    try:
        code = run_guarded(dispatch, words)
    except SystemExit as leaving:  # of an argument parser
        code = int(leaving.code or 0)
    error = capfd.readouterr().err
    assert code == 0 or NOT_THERE.search(error), error


def test_a_stale_command_is_seen(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for stale in ("run grpo --num_generations=8", "run grpo --steps=many", "report runs/a --out"):
        assert run_guarded(dispatch, provide(words_of(f"spmd-rl {stale}"), "README.md", folder))
        assert not NOT_THERE.search(capfd.readouterr().err)
        (folder / "examples").unlink()


def test_commands_are_found_on_a_page() -> None:
    page = """
    spmd-rl run grpo --steps 3     what it does
```sh
spmd-rl plan grpo --world 2 \\
    --gpu-gib G     # why
torchrun --nproc-per-node 8 -m spmd_rl run RECIPE ...
```
Text, `spmd-rl rewind RUN STEP` and `spmd-rl`.
"""
    assert [words_of(said) for said in commands(page)] == [
        ["run", "grpo", "--steps", "3"],
        ["plan", "grpo", "--world", "2", "--gpu-gib", "80"],
        ["run", "grpo"],
        ["rewind", "RUN", "3"],
    ]


def test_a_model_of_a_command_is_a_folder() -> None:
    """A name on the Hugging Face Hub is none: a run reads from disk."""
    is_hub_name = re.compile(r"--(?:model|teacher)[ =][A-Z]\w+/")
    assert [said for _, said in all_commands() if is_hub_name.search(said)] == []


def test_no_page_installs_the_package_from_an_index() -> None:
    """It is on none: its extras are installed from the repository, as `-e '.[name]'`."""
    is_from_index = re.compile(r"install[^`\n]*spmd-rl\[")
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    assert [name for name, text in texts.items() if is_from_index.search(text)] == []


def test_the_plan_of_the_first_job_is_what_the_command_prints(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/first-job.md").read_text(encoding="utf-8")
    words = words_of(next(said for said in commands(page) if said.startswith("spmd-rl plan")))
    provide(words, "docs/first-job.md", folder)
    (folder / "runs/smollm2-135m/config.json").write_text(json.dumps(SMOLLM2))
    assert run_guarded(dispatch, words) == 0
    shown = page.partition("ends with:\n\n```\n")[2].partition("```")[0]
    assert capsys.readouterr().out.endswith(shown)
    assert "memory of train + infer" in shown

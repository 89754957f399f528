"""Hooks by name: loading, signatures, and errors that say what is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.hooks.signatures import (
    RewardForm,
    load_generate,
    load_keep_group,
    load_reward,
    reward_weights,
)
from spmd_rl.rewards.answers import match


def test_a_function_by_module_and_by_file(tmp_path: Path) -> None:
    assert load_reward("spmd_rl.rewards.answers.match:exact").function is match.exact
    file = tmp_path / "mine.py"
    file.write_text("def half(prompt, sample):\n    return 0.5\n")
    assert load_reward(f"{file}:half").function(None, None) == 0.5
    assert load_reward(f"{file}:half") == load_reward(f"{file}:half")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("rules:", "write it as package.module:function or path/to/file.py:function"),
        ("no.such.module:f", "there is no module 'no.such.module'"),
        (
            "spmd_rl.rewards.answers.match:exakt",
            "has no 'exakt' .its functions: exact, contains, last_number",
        ),
        ("nowhere/mine.py:f", "there is no file nowhere/mine.py"),
        ("spmd_rl.rewards.answers.match:re", "it is a module, not a function"),
    ],
)
def test_a_wrong_name_is_told_with_the_fix(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_reward(name)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "def f(sample):\n    return 1",
            r"it is f\(sample\): write it as reward\(prompt, sample\) or reward\(ctx, prompt, sam",
        ),
        (
            "def f(prompt, sample, *, strict):\n    return 1",
            r"for one sample, or reward\(prompt, sam",
        ),
        ("def f(context, prompt, sample):\n    return 1", r"reward\(ctx, prompt, sample\)"),
        ("async def f(ctx, prompt):\n    return 1", r"it is async f\(ctx, prompt\): write it as"),
        ("1 / 0", "importing it raised ZeroDivisionError"),
        (
            "import no_such_package",
            "importing it raised ModuleNotFoundError: No module named 'no_such_package'",
        ),
        ("x = 1\ndef  f(:\n", r"importing it raised SyntaxError: .* .mine.py, line 2.: def  f\(:$"),
        (
            "if True:\nx = 1\n",
            r"importing it raised IndentationError: .* .mine.py, line 2.: x = 1$",
        ),
        ("raise SystemExit(0)", "importing it raised SystemExit: 0"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(
    tmp_path: Path, source: str, sentence: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=sentence):
        load_reward(f"{file}:f")


@pytest.mark.parametrize(
    ("line", "form"),
    [
        ("def f(prompt, sample)", RewardForm(False, False, False)),
        ("def f(p, s, strict=True)", RewardForm(False, False, False)),
        ("def f(*inputs)", RewardForm(False, False, False)),
        ("def f(ctx, prompt, sample)", RewardForm(True, False, False)),
        ("def f(prompt, samples)", RewardForm(False, True, False)),
        ("async def f(prompt, sample)", RewardForm(False, False, True)),
        ("async def f(ctx, prompt, samples)", RewardForm(True, True, True)),
    ],
)
def test_the_names_of_parameters_say_how_a_reward_is_called(
    tmp_path: Path, line: str, form: RewardForm
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{line}:\n    return 1\n")
    assert load_reward(f"{file}:f").form == form


OF_OTHERS = [
    "(completions, **kwargs)",
    "(completions, answer, **kwargs)",
    "(prompts, completions, **kwargs)",
    "(prompts, completions, completion_ids, **kwargs)",
    "(prompts, completions, ground_truth, **kwargs)",
    "(data_source, solution_str, ground_truth, extra_info=None)",
    "(data_sources, solution_strs, ground_truths, extra_infos)",
    "(solution_str, ground_truth)",
    "(solution_str, ground_truth, **kwargs)",
    "(args, sample, **kwargs)",
    "(args, samples)",
    "(queries, prompts, labels)",
    "(completion, answer)",
    "(prompt, completion)",
    "(prompt, response)",
    "(sample, prompt)",
    "(ctx, completions, answer, **kwargs)",
    "(prompt, ctx)",
]
MADE_AS = {
    "function": "def f{0}:\n    return 1",
    "async function": "async def f{0}:\n    return 1",
    "object": "class J:\n    def __call__(self, {1}:\n        return 1\nf = J()",
    "lambda": "f = lambda {2}: 1",
    "method": "class J:\n    def score(self, {1}:\n        return 1\nf = J().score",
    "partial": (
        "import functools\ndef g(weight, {1}:\n    return 1\nf = functools.partial(g, 0.5)"
    ),
}


@pytest.mark.parametrize("parameters", OF_OTHERS)
@pytest.mark.parametrize("made_as", MADE_AS)
def test_a_reward_of_another_program_is_refused_with_the_right_form(
    tmp_path: Path, made_as: str, parameters: str
) -> None:
    file = tmp_path / "mine.py"
    source = MADE_AS[made_as].format(parameters, parameters[1:], parameters[1:-1])
    file.write_text(f"{source}\n")
    with pytest.raises(ConfigError) as refused:
        load_reward(f"{file}:f")
    sentence = str(refused.value)
    assert f"f{parameters}: write it as reward(prompt, sample) or reward(ctx, prompt" in sentence
    assert "sample.text is what the model wrote, prompt.answer the record's answer" in sentence


@pytest.mark.parametrize("made_as", MADE_AS)
@pytest.mark.parametrize("parameters", ["(prompt, sample)", "(p, s)", "(prompt, sample, answer=1)"])
def test_a_reward_of_ours_is_taken_however_it_is_made(
    tmp_path: Path, made_as: str, parameters: str
) -> None:
    file = tmp_path / "mine.py"
    source = MADE_AS[made_as].format(parameters, parameters[1:], parameters[1:-1])
    file.write_text(f"{source}\n")
    form = load_reward(f"{file}:f").form
    assert form == RewardForm(False, False, made_as == "async function")


def test_a_class_is_no_reward_but_its_object_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Score:\n    def __init__(self, prompt, sample):\n        pass\n")
    with pytest.raises(ConfigError, match=r"it is a class, Score\(prompt, sample\): write it as"):
        load_reward(f"{file}:Score")


def test_a_partial_of_an_async_object_is_async(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    source = "import functools\nclass J:\n    async def __call__(self, w, prompt, sample):\n"
    file.write_text(f"{source}        pass\nf = functools.partial(J(), 2)\n")
    assert load_reward(f"{file}:f").form == RewardForm(False, False, True)


def test_an_object_with_an_async_call_is_async(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class J:\n    async def __call__(self, prompt, sample):\n        pass\nf = J()"
    )
    assert load_reward(f"{file}:f").form == RewardForm(False, False, True)


@pytest.mark.parametrize(
    "line",
    [
        "def f(ctx, prompt, engine)",
        "async def f(prompt, engine)",
        "async def f()",
        "async def f(args, sample, sampling_params)",
        "async def f(ctx, engine, prompt)",
    ],
)
def test_an_episode_is_async_and_takes_three(tmp_path: Path, line: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{line}:\n    return 1\n")
    with pytest.raises(ConfigError, match=r"write it as async generate\(ctx, prompt, engine\)"):
        load_generate(f"{file}:f")


@pytest.mark.parametrize(
    "line", ["def f(group)", "async def f(ctx, group)", "def f(args, samples)"]
)
def test_keep_group_is_plain_and_takes_two(tmp_path: Path, line: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{line}:\n    return 1\n")
    with pytest.raises(ConfigError, match=r"write it as keep_group\(ctx, group\)"):
        load_keep_group(f"{file}:f")


def test_several_rewards_have_weights_and_names_of_their_own() -> None:
    assert reward_weights("") == {}
    assert reward_weights("a.py:f") == {"a.py:f": 1.0}
    assert reward_weights({"a.py:f": 0.5, "a.py:g": 2}) == {"a.py:f": 0.5, "a.py:g": 2}
    with pytest.raises(ConfigError, match="two functions are called 'f'"):
        reward_weights({"a.py:f": 0.5, "b.py:f": 2})

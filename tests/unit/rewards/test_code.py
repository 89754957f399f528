"""The grader of programs: which block is the program, the forms of tests, and hostile programs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.errors import ConfigError, DataError
from spmd_rl.hooks.rank.tasks import Failed, Graded
from spmd_rl.rewards.code import graders as code_module
from spmd_rl.rewards.code.code_tests import AssertTest, CallTest, PairTest, read_tests
from spmd_rl.rewards.code.graders import code, last_block
from spmd_rl.rewards.code.sandbox import Outcome
from tests.unit.hooks.cases import make_sample
from tests.unit.rewards.graded import context, grade, make_prompt
from tests.unit.rewards.sandboxed import Marked, needs_sandbox


def fenced(program: str, word: str = "python") -> str:
    return f"Here it is:\n```{word}\n{program}\n```\nThat is all."


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("no block", None),
        ("```python\nx = 1\n", None),
        (fenced("x = 1"), "x = 1\n"),
        (fenced("x = 1", "py"), "x = 1\n"),
        (fenced("x = 1", "Python3 title=a"), "x = 1\n"),
        (fenced("x = 1", ""), "x = 1\n"),
        (fenced("ls", "bash"), None),
        (fenced("x = 1") + fenced("x = 2") + fenced("ls", "bash"), "x = 2\n"),
        (fenced("x = 1") + fenced("output", ""), "x = 1\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("  ```python\r\nx = 1\r\n  ```", "x = 1\r\n"),
        (fenced("x = 1") + "\n```python\nx = 2", "x = 1\n"),
        ("```python\nx = '\u2028\x0c'\n```", "x = '\u2028\x0c'\n"),
        ("```python\nx = 1\n``` done", "x = 1\n"),
        ("```python\nx = 1\n```That is all.", "x = 1\n"),
        ("```python\nx = 1\n```output\n3\n```", "x = 1\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("~~~ py\nx = 1\n~~~~ end", "x = 1\n"),
        ("~~~\nx = 1\n~~~", "x = 1\n"),
        ('~~~python\ns = """\n```\n"""\n~~~', 's = """\n```\n"""\n'),
        ('```python\ns = """\n~~~\n"""\n```', 's = """\n~~~\n"""\n'),
        ("```python\nx = 1\n\n```python\nx = 2\n```", "x = 2\n"),
        ("```{.python}\nx = 1\n```", "x = 1\n"),
        ("~~~python\nx = 1\n```", None),
    ],
)
def test_the_last_closed_block_of_the_language_is_the_program(text: str, block: str | None) -> None:
    assert last_block(text, "python") == block


PLAIN = st.text(st.characters(exclude_characters="`~"))


@settings(max_examples=1000)
@given(PLAIN, PLAIN, PLAIN, st.sampled_from(["python", "py", "Python3"]))
def test_what_stands_in_a_block_is_kept(before: str, program: str, after: str, word: str) -> None:
    text = f"{before}\n```\nsays\n```\n```{word}\n{program}\n```\n{after}"
    assert last_block(text, "python") == f"{program}\n"
    assert last_block(text.rpartition("```")[0], "python") == "says\n"


def outcome(text: str) -> Outcome:
    return Outcome(text.encode(), 0, "exit")


@pytest.mark.parametrize("ended_by", ["exit", "time", "output"])
def test_a_program_that_was_ended_has_not_passed(
    ended_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if all that it was to print is there, and nothing says that it failed."""
    monkeypatch.setattr(code_module, "run_in_sandbox", lambda *_: Outcome(b"3\n", 0, ended_by))
    prompt = make_prompt({"tests": [["1 2", "3"]]})
    found = code(context(), prompt, make_sample(fenced("print(3)")))
    assert found["reward"] == found["passed"] == float(ended_by == "exit")


@pytest.mark.parametrize(
    ("printed", "passes"),
    [
        ("1 2\n3\n", True),
        ("1 2  \r\n3\n\n\n", True),
        ("1 2\n3", True),
        ("1  2\n3", False),
        (" 1 2\n3", False),
        ("1 2\n\n3", False),
        ("1 2", False),
        ("", False),
    ],
)
def test_output_is_compared_by_line(printed: str, passes: bool) -> None:
    assert PairTest("", "1 2 \n3\n").passes(outcome(printed)) is passes


@settings(max_examples=1000)
@given(st.lists(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)))
def test_blanks_at_the_ends_of_lines_do_not_count(lines: list[str]) -> None:
    test = PairTest("", "\n".join(lines))
    assert test.passes(outcome(" \n".join(lines) + "\n \n"))
    assert not test.passes(outcome("\n".join([*lines, "more"])))


@pytest.mark.parametrize(
    ("expected", "returned", "passes"),
    [
        (3, "3", True),
        (3, "4", False),
        ([1, [2]], "[1, [2]]", True),
        ([1, 2], "[1]", False),
        (0.3, "0.30000000000000004", True),
        (0.3, "0.31", False),
        (1.5, "1" + "0" * 4000, False),
        ({"a": 0.5}, '{"a": 0.5000000001}', True),
        ({"a": 1}, '{"b": 1}', False),
        ("x", '"x"', True),
        (None, "null", True),
        (1, "", False),
        (1, "1 1", False),
        (1, "[" * 100_000, False),
        (1, "1" * 10_000, False),
    ],
)
def test_returned_values_are_compared(expected: Any, returned: str, passes: bool) -> None:
    assert CallTest("f", [], [expected]).passes(outcome(returned)) is passes


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=200)
@given(VALUES)
def test_a_value_equals_itself_and_nothing_around_it(value: Any) -> None:
    test = CallTest("f", [], [value])
    assert test.passes(outcome(json.dumps(value)))
    assert not test.passes(outcome(json.dumps([value])))
    assert not test.passes(outcome(json.dumps({"": value})))


def test_forms_of_tests_in_the_field() -> None:
    def forms(meta: dict[str, Any], answer: str = "") -> list[Any]:
        return read_tests(make_prompt(meta, answer))

    pair = [PairTest("1\n2", "3")]
    inputs = {"inputs": ["1\n2"], "outputs": ["3"]}
    assert forms({"tests": inputs}) == forms({"tests": json.dumps(inputs)}) == pair
    assert forms({}, json.dumps(inputs)) == pair
    assert forms({"tests": {"inputs": [["1", "2"]], "outputs": [["3"]]}}) == pair
    assert forms({"tests": [["1\n2", "3"]]}) == pair
    assert forms({"tests": [{"input": "1\n2", "output": "3", "testtype": "stdin"}]}) == pair
    apps = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}
    assert forms({"tests": apps}) == [CallTest("add", [1, 2], [[3], 3])]
    prime = {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}
    assert forms({"tests": prime}) == [CallTest("add", [1, 2], [3])]
    live = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    assert forms({"tests": live, "func_name": "add"}) == [CallTest("add", [1, 2], [3])]
    (test,) = forms({"tests": ["assert add(1, 2) == 3"]})
    assert isinstance(test, AssertTest) and not test.passes(outcome("x"))


@pytest.mark.parametrize(
    "tests",
    [
        "no JSON",
        3,
        [],
        [3],
        [["1"]],
        {"inputs": ["1"]},
        {"inputs": ["1", "2"], "outputs": ["1"]},
        {"fn_name": "f", "inputs": ["{"], "outputs": ["1"]},
        {"fn_name": "f", "inputs": [3], "outputs": ["1"]},
    ],
    ids=str,
)
def test_tests_that_cannot_be_used_are_told(tests: Any) -> None:
    with pytest.raises(DataError, match=r"prompt 7 of train.jsonl: tests: (expected|there are no)"):
        read_tests(make_prompt({"tests": tests}))


def test_without_a_program_the_reward_is_zero() -> None:
    prompt = make_prompt({"tests": [["1", "1"]]})
    nothing = {"reward": 0.0, "passed": 0.0, "program": 0.0}
    assert code(context(), prompt, make_sample("print(1)")) == nothing


def graded(tests: Any, program: str, **settings: Any) -> dict[str, float]:
    return code(context(code=settings), make_prompt({"tests": tests}), make_sample(fenced(program)))


@needs_sandbox
def test_programs_are_graded_by_pairs() -> None:
    tests = {"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3", "7", "11"]}
    right = graded(tests, "a, b = map(int, input().split())\nprint(a + b)")
    assert right == {"reward": 1.0, "passed": 1.0, "program": 1.0}
    some = graded(tests, "a, b = map(int, input().split())\nprint(a + b if a < 5 else 1 / 0)")
    assert some == {"reward": 0.0, "passed": pytest.approx(2 / 3), "program": 1.0}
    late = graded(tests, "a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(1)")
    assert late["passed"] == 0.0, "a program that fails has not passed, whatever it printed"


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b):\n    print('noise')\n    return a + b",
        "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        return a + b",
    ],
)
def test_programs_are_graded_by_calls(program: str) -> None:
    tests = {"fn_name": "add", "inputs": ["1\n2", "2\n2"], "outputs": ["3", "5"]}
    assert graded(tests, program) == {"reward": 0.0, "passed": 0.5, "program": 1.0}


@needs_sandbox
def test_programs_are_graded_by_asserts() -> None:
    tests = ["assert add(1, 2) == 3", "assert _twice(2) == 4"]
    program = "def add(a, b):\n    return a + b\ndef _twice(a):\n    return a * {}"
    assert graded(tests, program.format(2))["reward"] == 1.0
    assert graded(tests, program.format(3))["passed"] == 0.5
    for leave in ("import sys; sys.exit(0)", "import os; os._exit(0)"):
        assert graded(tests, f"{program.format(2)}\n{leave}")["passed"] == 0.0


@needs_sandbox
def test_other_languages_have_their_command() -> None:
    tests, shell = [["3", "6"]], {"language": "bash", "command": ["/bin/sh"]}
    prompt = make_prompt({"tests": tests})
    sample = make_sample(fenced("read x\necho $((x * 2))", "bash"))
    assert code(context(code=shell), prompt, sample)["reward"] == 1.0
    calls = make_prompt({"tests": ["assert True"]})
    with pytest.raises(DataError, match="calls and asserts need graders.code.language = 'python'"):
        code(context(code=shell), calls, sample)


HOSTILE = {
    "forks": "import os\nwhile True:\n    os.fork()",
    "reads": "print(open('/etc/passwd').read())",
    "dials": "import socket\nsocket.create_connection(('127.0.0.1', 80))",
    "prints": "while True:\n    print('x' * 1000)",
    "fills": "while True:\n    open('/tmp/x', 'ab').write(b'x' * (1 << 20))",
    "allocates": "x = []\nwhile True:\n    x.append(bytearray(1 << 24))",
    "kills": "import os\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)",
    "stays": "import os, signal\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    "        signal.pause()\nos._exit(0)",
    "traces": "import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.ptrace(16, 1, 0, 0))",
    "burns": "while True:\n    pass",
    "threads": "from threading import Event, Thread\nwhile True:\n"
    "    Thread(target=Event().wait, daemon=True).start()",
    "nests": "x = " + "(" * 5000 + ")" * 5000,
    "binary": "import sys\nsys.stdout.buffer.write(bytes(range(256)) * 1000)",
}


@needs_sandbox
def test_each_hostile_program_costs_its_own_sample_alone() -> None:
    marked = Marked(cpu_s=1, test_s=100.0, deadline_s=100.0, memory_mb=256)
    names, good = [*HOSTILE], fenced("print(input())")
    texts = [text for name in names for text in (fenced(HOSTILE[name]), good)]
    config = {"graders": {"code": marked.settings | {"command": list(marked.cfg.command)}}}
    events = grade("code", make_prompt({"tests": [["7", "7"]]}), texts, config, processes=2)
    rewards = [event.grades["code"][0].reward for event in events if isinstance(event, Graded)]
    assert rewards == [0.0, 1.0] * len(names), dict(zip(names, rewards[::2], strict=False))
    assert marked.processes() == []


# these would go on for ever, and are ended by the time of a test
ENDLESS = {
    "sleeps": "import time\ntime.sleep(1e6)",
    "forks": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n"
    "        pass",
}


@needs_sandbox
def test_an_endless_program_is_ended_with_all_that_it_has_started() -> None:
    marked = Marked(test_s=1.0, processes=4)
    config = {"graders": {"code": marked.settings | {"command": list(marked.cfg.command)}}}
    texts = [fenced(program) for program in ENDLESS.values()]
    events = grade("code", make_prompt({"tests": [["7", "7"]]}), texts, config, processes=1)
    assert [event.grades["code"][0].reward for event in events] == [0.0, 0.0]
    assert marked.processes() == []


@needs_sandbox
def test_tests_that_cannot_be_used_fail_the_sample_in_the_pool() -> None:
    (event,) = grade("code", make_prompt({"tests": 3}), [fenced("x")], {})
    assert isinstance(event, Failed)
    assert "raised DataError: prompt 7 of train.jsonl: tests: expected" in event.error


def test_a_run_does_not_start_where_there_is_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/such/folder")
    with pytest.raises(ConfigError, match="reward 'code' needs bwrap, which is missing: install"):
        grade("code", make_prompt({"tests": [["1", "1"]]}), ["x"], {})

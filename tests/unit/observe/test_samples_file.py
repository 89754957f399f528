"""Samples come back from their file with all bits, or a sentence says which line is broken."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spmd_rl as rl
from spmd_rl.errors import DataError
from spmd_rl.observe.run_folder import RunFolder
from spmd_rl.observe.samples_file import samples_as_json_lines
from spmd_rl.types.groups import Group
from spmd_rl.types.samples import Sample

FLOATS = st.floats(width=32, allow_nan=False) | st.just(float("nan"))
# values that cross between processes, and that JSON has
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
DICTS = st.dictionaries(st.text(max_size=3), PLAIN, max_size=2)


def _float32(values: list[float]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, np.float32)


@st.composite
def samples(draw: st.DrawFn, uid: int, index: int) -> Sample:
    size = draw(st.integers(0, 5))

    def listed(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=size, max_size=size))

    sample = Sample(
        uid,
        index,
        np.array(listed(st.integers(0, 2**31 - 1)), np.int32),
        _float32(listed(FLOATS)),
        np.array(listed(st.integers(-1, 3)), np.int32),
        draw(st.sampled_from(["completed", "truncated", "aborted", "failed"])),
        draw(st.floats(1e-6, 1e30)),
        draw(st.text(st.characters())),  # also halves of surrogate pairs
        draw(st.floats()),
        draw(st.dictionaries(st.text(max_size=3), st.floats(), max_size=2)),
        draw(st.integers(-1, 9)),
        draw(st.binary(max_size=8)),
        metadata=draw(DICTS),
    )
    if draw(st.booleans()):
        values = listed(st.lists(st.integers(-9, 9), min_size=2, max_size=2))
        column = np.array(values, np.int16).reshape(len(sample.tokens), 2)
        sample = sample.replace(columns={"seen": column})
    if draw(st.booleans()):
        context = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4))
        sample = sample.replace(context=np.array(context, np.int32))
    if draw(st.booleans()):
        return sample
    return sample.replace(mask=np.array(listed(st.booleans()), np.bool_))


@st.composite
def groups(draw: st.DrawFn, uid: int) -> Group:
    made = [draw(samples(uid, index)) for index in range(draw(st.integers(1, 4)))]
    tokens = np.array(draw(st.lists(st.integers(0, 99), max_size=3)), np.int32)
    prompt = rl.Prompt(uid, tokens, draw(st.text()), draw(st.text()), "file", draw(DICTS))
    by_failure: dict[bool, list[Sample]] = {False: [], True: []}
    for sample in made:
        by_failure[sample.status == "failed"].append(sample)
    return Group(prompt, by_failure[False], by_failure[True])


def written(folder: Path, lines: str) -> Path:
    (folder / "samples").mkdir(exist_ok=True)
    (folder / "samples" / "step_00007.jsonl").write_text(lines, encoding="utf-8")
    return folder


def bits(group: Group) -> list[Any]:
    """All that a group holds, with arrays as bytes and NaN as equal to itself.

    A sample beside others with a column has zeros in it, which is as if it had none.
    """

    def of(one: Any) -> str:
        fields = [(field.name, getattr(one, field.name)) for field in dataclasses.fields(one)]
        if isinstance(one, Sample):
            seen = [(name, a.tobytes()) for name, a in one.columns.items() if a.any()]
            fields = [*((name, value) for name, value in fields if name != "columns"), ("", seen)]
        return repr(
            [
                (name, value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else value
                for name, value in fields
            ]
        )

    return [of(group.prompt), sorted(map(of, group.samples)), sorted(map(of, group.failed))]


@given(st.data(), st.integers(0, 3))
def test_all_bits_come_back(tmp_path_factory: Any, data: st.DataObject, num_groups: int) -> None:
    made = [data.draw(groups(uid)) for uid in range(num_groups)]
    folder = written(tmp_path_factory.mktemp("run"), samples_as_json_lines(made))
    assert [bits(group) for group in rl.read_groups(folder, 7)] == [bits(group) for group in made]


def line(**changed: Any) -> str:
    """Return a line of the file, with these values changed; None removes one."""
    zero = np.zeros(2, np.int32)
    sample = Sample(3, 0, zero, zero.astype(np.float32), zero, "completed", reward=1.0)
    (row,) = samples_as_json_lines([Group(rl.Prompt(3, zero), [sample])]).splitlines()
    values = json.loads(row) | changed
    return json.dumps({key: value for key, value in values.items() if value is not None}) + "\n"


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ("{\n", "step_00007.jsonl:2: not valid JSON"),
        (line(status="stop"), "step_00007.jsonl:2: not the record of a sample: Invalid enum"),
        (line(status=None), "not the record of a sample: .* required field `status`"),
        (line(prompt_tokens=None), "not the record of a sample: .*`prompt_tokens`"),
        (line(logprobs=[0.0]), "its tokens lack log-probs or versions"),
        (line(mask=[True]), "its tokens lack log-probs or versions"),
    ],
    ids=["json", "status", "no status", "no prompt", "log-probs", "mask"],
)
def test_a_broken_line_is_named(tmp_path: Path, broken: str, problem: str) -> None:
    assert len(rl.read_groups(written(tmp_path, line()), 7)) == 1
    with pytest.raises(DataError, match=problem):
        rl.read_groups(written(tmp_path, line() + broken), 7)


def test_a_step_without_samples(tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path / "run", "", {})
    run.write_samples(7, [])
    assert rl.read_groups(run.path, 7) == []
    with pytest.raises(DataError, match=r"00008.jsonl: .* the last step with samples is 7"):
        rl.read_groups(run.path, 8)
    with pytest.raises(DataError, match=r"00001.jsonl: there is no such file; no step has samples"):
        rl.read_groups(tmp_path, 1)


def test_a_line_holds_what_differs_from_the_usual() -> None:
    usual = set(json.loads(line()))
    assert usual == {
        *("prompt_uid", "index", "prompt", "answer", "text", "reward", "status", "tokens"),
        *("logprobs", "versions", "parts", "prompt_tokens", "temperature"),
    }
    observed = np.array([0, -1], np.int32)
    (row,) = samples_as_json_lines(
        [
            Group(
                rl.Prompt(3, observed),
                [Sample(3, 0, observed, observed.astype(np.float32), observed, "completed")],
            )
        ]
    ).splitlines()
    assert json.loads(row)["versions"] == [0, -1]
    assert "mask" not in json.loads(row), "the versions say it"


def test_what_json_lacks_is_written_as_python_shows_it() -> None:
    zero = np.zeros(1, np.int32)
    for value in (1 + 2j, [None, {1 + 2j}]):
        sample = Sample(
            3, 0, zero, zero.astype(np.float32), zero, "completed", metadata={"odd": value}
        )
        (row,) = samples_as_json_lines([Group(rl.Prompt(3, zero), [sample])]).splitlines()
        assert "(1+2j)" in json.dumps(json.loads(row)["metadata"])


def test_times_are_not_recorded(tmp_path: Path) -> None:
    """Runs with the same settings write the same files."""
    zero = np.zeros(1, np.int32)
    sample = Sample(3, 0, zero, zero.astype(np.float32), zero, "completed")
    timed = sample.replace(metadata={"times": {"drawn": 1.0}, "a": 1})
    lines = samples_as_json_lines([Group(rl.Prompt(3, zero), [timed])])
    (group,) = rl.read_groups(written(tmp_path, lines), 7)
    assert group.samples[0].metadata == {"a": 1}
    assert timed.metadata == {"times": {"drawn": 1.0}, "a": 1}

"""Every op has its file, a test against an oracle, one of its bits, and a measurement:
docs/numerics.md says which.
"""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from typing import NamedTuple

import pytest

from benchmarks.table import RESULTS, read_results
from spmd_rl import kernels
from tests.laws.source import ROOT

HELPERS = {  # what ops are given, or say of themselves
    *(
        "ROW_TILE",
        "AttentionBackend",
        "KvCache",
        "KvSlots",
        "QkNorm",
        "Rotary",
        "Scores",
        "TokenAttention",
        "attention_backend",
        "contract",
        "unpad_rows",
        "is_exact",
        "pad_rows",
        "padded_rows",
        "recomputing",
    ),
    *("position_keys", "rope_table", "stream_bases", "stream_keys"),
}
# tested in what calls them too
PARTS = {"blocked_attention", "decode_inputs", "decode_outputs", "merge_states"}
CELLS = re.compile(r"`([^`]+)`|\[\w+\]\(\.\./(\S+) \"([^\"]+)\"\)")


class Op(NamedTuple):
    name: str
    file: str
    right: str
    bits: str
    results: str
    rows: str


def ops() -> list[Op]:
    text = (
        (ROOT / "docs/numerics.md")
        .read_text(encoding="utf-8")
        .partition("## Every op\n")[2]
        .partition("\n## ")[0]
    )
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [Op(*(part for cell in CELLS.findall(line) for part in cell if part)) for line in lines]


def defined(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def problems(op: Op) -> list[str]:
    """What the table says of an op that is not so."""
    found = (
        [] if op.name in defined(f"spmd_rl/kernels/{op.file}") else [f"{op.file} has no {op.name}"]
    )
    for file, test in (one.split("::") for one in (op.right, op.bits)):
        if test not in defined(f"tests/{file}"):
            found.append(f"{file} has no {test}")
        elif op.name not in PARTS and not any(
            op.name in text for text in with_helpers(f"tests/{file}")
        ):
            found.append(f"{file} does not know {op.name}")
    machine, script = op.results.removesuffix(".json").split("/")[-2:]
    results = [
        one
        for one in read_results(RESULTS)
        if (one.machine, one.script) == (machine, f"{script}.py")
    ]
    if not any(fnmatchcase(row.what, op.rows) for one in results for row in one.rows):
        found.append(f"{op.results} has no {op.rows}")
    return found


def with_helpers(path: str) -> list[str]:
    """The text of a file of tests, and of what it imports from other files of tests."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = [text]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            here = str(node.module).replace(".", "/")
            files = [f"{here}.py", *(f"{here}/{one.name}.py" for one in node.names)]
            found += [
                part for file in files if (ROOT / file).is_file() for part in with_helpers(file)
            ]
    return found


def test_every_op_is_in_the_table() -> None:
    assert set(kernels.__all__) - HELPERS <= {op.name for op in ops()}
    assert set(kernels.__all__) >= HELPERS


@pytest.mark.parametrize("op", ops(), ids=lambda op: op.name)
def test_what_the_table_names_is_there(op: Op) -> None:
    assert problems(op) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"file": "rowwise/rope.py"},
        {"bits": "unit/kernels/test_interleaved_timing.py::test_each_comes_after_each_other"},
        {"right": "gpu/kernels/test_oracles.py::test_no_such_test"},
        {"rows": "*: no such row"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_control_a_wrong_cell_is_seen(wrong: dict[str, str]) -> None:
    op = next(op for op in ops() if op.name == "silu_mul")
    assert problems(op) == []
    assert len(problems(op._replace(**wrong))) == 1

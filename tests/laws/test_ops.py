"""Every op has its file, a test against an oracle, one of its bits, and a measurement: docs/numerics.md says which."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from typing import NamedTuple

import pytest

from benchmarks.table import RESULTS, read_results
from spmd_rl import kernels
from tests.laws.source import PACKAGE, ROOT

HELPERS = {  # what ops are given, or say of themselves
    *("ROW_TILE", "KvCache", "KvPlace", "contract", "cut_rows", "is_exact", "pad_rows", "padded_rows", "remaking"),
    *("position_keys", "rope_table", "stream_bases", "stream_keys"),
}
CELLS = re.compile(r"`([^`]+)`|\[\w+\]\(\.\./(\S+) \"([^\"]+)\"\)")


class Op(NamedTuple):
    name: str
    file: str
    right: str
    bits: str
    results: str
    rows: str


def ops() -> list[Op]:
    text = (ROOT / "docs/numerics.md").read_text(encoding="utf-8").partition("## Every op\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [Op(*(part for cell in CELLS.findall(line) for part in cell if part)) for line in lines]


def defined(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_every_op_is_in_the_table() -> None:
    assert set(kernels.__all__) - HELPERS <= {op.name for op in ops()}
    assert set(kernels.__all__) >= HELPERS


@pytest.mark.parametrize("op", ops(), ids=lambda op: op.name)
def test_what_the_table_names_is_there(op: Op) -> None:
    assert op.name in defined(str(PACKAGE.relative_to(ROOT) / "kernels" / op.file))
    for file, test in (one.split("::") for one in (op.right, op.bits)):
        assert test in defined(f"tests/{file}"), f"{file} has no {test}"
    machine, script = op.results.removesuffix(".json").split("/")[-2:]
    found = [one for one in read_results(RESULTS) if one.machine == machine and one.script == f"{script}.py"]
    assert [row for one in found for row in one.rows if fnmatchcase(row.what, op.rows)], f"no row {op.rows}"

"""Small files, small functions, typed returns. The maxima are ratchets: lower them when you can,
never raise them.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from statistics import median, quantiles

from tests.laws.source import Module, functions, num_lines, package_modules, parse

MAX_MODULE = 350
MAX_CLASS = 250
MAX_FUNCTION = 60
MAX_KERNEL = 130
MEDIAN_FUNCTION = 10
MAX_FILES = 24  # of a folder, besides __init__.py
MAX_NODES = 400  # of a function's syntax tree
MAX_KERNEL_NODES = 700
NODES_P90 = 170  # of nine functions in ten


def too_long(modules: Iterable[Module]) -> list[str]:
    found = []
    for module in modules:
        if module.num_lines > MAX_MODULE:
            found.append(f"{module.name}: {module.num_lines} lines")
        limit = MAX_KERNEL if module.room == "kernels" else MAX_FUNCTION
        for function in functions(module):
            if num_lines(function) > limit:
                found.append(
                    f"{module.name}:{function.lineno} {function.name}: {num_lines(function)} lines"
                )
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and num_lines(node) > MAX_CLASS:
                found.append(f"{module.name}:{node.lineno} {node.name}: {num_lines(node)} lines")
    return found


def too_full(modules: Iterable[Module]) -> list[str]:
    """Folders with more files than the law allows."""
    parents = {module.name: module.name.rpartition(".")[0] for module in modules}
    files = Counter(parent for name, parent in parents.items() if name not in parents.values())
    return [f"{folder}: {count} files" for folder, count in files.items() if count > MAX_FILES]


def num_nodes(function: ast.AST) -> int:
    return sum(1 for _ in ast.walk(function))


def too_dense(modules: Iterable[Module]) -> list[str]:
    """Functions with more nodes than the law allows."""
    found = []
    for module in modules:
        limit = MAX_KERNEL_NODES if module.room == "kernels" else MAX_NODES
        for function in functions(module):
            name = f"{module.name}:{function.name}"
            if num_nodes(function) > limit:
                found.append(f"{name}: {num_nodes(function)} nodes")
    return found


def untyped_returns(modules: Iterable[Module]) -> list[str]:
    return [
        f"{module.name}:{function.lineno} {function.name}"
        for module in modules
        for function in functions(module)
        if function.returns is None
    ]


def undescribed(modules: Iterable[Module]) -> list[str]:
    return [module.name for module in modules if ast.get_docstring(module.tree) is None]


def test_nothing_is_too_long() -> None:
    assert too_long(package_modules()) == []


def test_no_folder_is_too_full() -> None:
    assert too_full(package_modules()) == []


def test_the_median_function_is_short() -> None:
    assert (
        median(num_lines(f) for module in package_modules() for f in functions(module))
        <= MEDIAN_FUNCTION
    )


def test_no_function_is_too_dense() -> None:
    assert too_dense(package_modules()) == []


def test_nine_functions_in_ten_are_plain() -> None:
    nodes = [num_nodes(f) for module in package_modules() for f in functions(module)]
    assert quantiles(nodes, n=10)[-1] <= NODES_P90


def test_every_function_says_what_it_returns() -> None:
    assert untyped_returns(package_modules()) == []


def test_every_module_says_what_it_is_for() -> None:
    assert undescribed(package_modules()) == []


def test_what_is_too_long_is_seen() -> None:
    body = "    x = 1\n"
    assert too_long([parse("spmd_rl.algo.x", "def f() -> None:\n" + body * MAX_FUNCTION)])
    assert too_long([parse("spmd_rl.algo.x", "class A:\n" + body * MAX_CLASS)])
    assert too_long([parse("spmd_rl.algo.x", "x = 1\n" * (MAX_MODULE + 1))])
    assert not too_long([parse("spmd_rl.kernels.x", "def f() -> None:\n" + body * MAX_FUNCTION)])


def test_a_full_folder_is_seen() -> None:
    files = [parse(f"spmd_rl.algo.x{number}", "") for number in range(MAX_FILES)]
    rooms = [parse("spmd_rl.algo", ""), parse("spmd_rl.algo.y", ""), parse("spmd_rl.algo.y.z", "")]
    assert not too_full([*files, *rooms])
    assert too_full([*files, *rooms, parse("spmd_rl.algo.w", "")]) == ["spmd_rl.algo: 25 files"]


def test_a_dense_function_is_seen() -> None:
    dense = "def f() -> None:\n    x = (" + "1 + " * (MAX_NODES // 2) + "1)\n"
    assert too_dense([parse("spmd_rl.algo.x", dense)])
    assert not too_dense([parse("spmd_rl.kernels.x", dense)])


def test_a_missing_type_or_docstring_is_seen() -> None:
    planted = [parse("spmd_rl.algo.x", "def f(x: int):\n    return x")]
    assert untyped_returns(planted)
    assert undescribed(planted)

"""What a rank holds is said in `model/held`: boxes are made there and in `weights` alone, and few
files know of three ways to share or store a model. What a number format is, `model/formats` says.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from spmd_rl.model.formats import FORMATS
from tests.laws.source import Module, calls, package_modules, parse

MAKERS = {"Box", "chunk_box", "chunk_of_box", "range_box", "part_box"}
# other files that make boxes, and of what
ELSEWHERE = {
    "spmd_rl.model.families.rules": "rows of Megatron-core's parameters",
    "spmd_rl.train.checkpoint.checkpoint_index": "boxes that a checkpoint names",
    "spmd_rl.train.fsdp2.sources": "codes and scales of rows",
    "spmd_rl.train.megatron.optimizer": "flat chunks of Megatron-core's optimizer",
    "spmd_rl.train.megatron.parameters": "rectangles of Megatron-core's parameters",
    "spmd_rl.train.optimizer.adamw": "scales of moments in 8 bits",
    "spmd_rl.train.optimizer.muon": "whole matrices of moments",
    "spmd_rl.train.optimizer.parameter_groups": "sizes of shards",
}
FEATURES = {
    "experts": r"expert|moe|mixture",
    "codes": r"coded|\bcodes|code_format|e4m3|int4|fp8",
    "tp": r"(?<![a-z])tp(?![a-z])|row_shards|tensor_parallel|tensor_shards|shard_exchange",
    "cp": r"(?<![a-z])cp(?![a-z])|sequence_shards|sequence_axis",
    "adapters": r"lora|adapter",
}
MANY, FILES_OF_MANY = 3, 40  # lower the second when you can


def makers_of_boxes(modules: Iterable[Module]) -> set[str]:
    """Files outside of `model/held` and `weights` that call what makes a box."""
    rooms = ("spmd_rl.model.held", "spmd_rl.weights")
    return {
        module.name
        for module in modules
        if not module.name.startswith(rooms) and MAKERS & {name for name, _ in calls(module)}
    }


def namers_of_formats(modules: Iterable[Module]) -> set[str]:
    """Files outside of `model/formats`, `kernels` and configs that name a number format."""
    rooms = ("spmd_rl.model.formats", "spmd_rl.kernels")
    return {
        module.name
        for module in modules
        if not module.name.startswith(rooms) and not module.name.endswith(".config")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and node.value in FORMATS
    }


def features_of(module: Module) -> list[str]:
    """The features that a file's names and texts speak of; docstrings and comments do not count."""
    words, docstrings = [], _docstrings(module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name | ast.Attribute | ast.arg | ast.alias | ast.keyword):
            words += [getattr(node, name, None) for name in ("id", "attr", "arg", "name")]
        elif isinstance(node, ast.ImportFrom):
            words.append(node.module)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            words.append(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.append(node.value if node.value not in docstrings else None)
    text = " ".join(word for word in words if word).lower()
    return [name for name, pattern in FEATURES.items() if re.search(pattern, text)]


def _docstrings(module: Module) -> set[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(module.tree) if isinstance(node, kinds)]
    return {ast.get_docstring(node, clean=False) or "" for node in nodes}


def test_boxes_are_made_where_a_rank_s_holding_is_said() -> None:
    assert makers_of_boxes(package_modules()) == set(ELSEWHERE)


def test_few_files_know_of_many_ways_to_hold_a_model() -> None:
    found = {module.name: features_of(module) for module in package_modules()}
    many = {name: features for name, features in found.items() if len(features) >= MANY}
    assert len(many) <= FILES_OF_MANY, many


def test_formats_are_named_where_they_are_said() -> None:
    assert namers_of_formats(package_modules()) == set()


def test_a_planted_name_of_a_format_is_seen() -> None:
    text = 'def f(cfg):\n    return cfg.weights == "int4"\n'
    for name, found in (("train.trainer", 1), ("train.config", 0), ("model.formats.int4", 0)):
        assert len(namers_of_formats([parse(f"spmd_rl.{name}", text)])) == found


def test_a_planted_box_is_seen() -> None:
    text = "def part(shape):\n    return chunk_box(shape, 0, 2)\n"
    assert makers_of_boxes([parse("spmd_rl.train.trainer", text)]) == {"spmd_rl.train.trainer"}
    assert makers_of_boxes([parse("spmd_rl.model.held.held", text)]) == set()


def test_planted_features_are_seen() -> None:
    text = '"""Of lora."""\ndef f(experts):\n    """cp"""\n    return axes["tp"], has_e4m3()\n'
    assert features_of(parse("spmd_rl.train.trainer", text)) == ["experts", "codes", "tp"]

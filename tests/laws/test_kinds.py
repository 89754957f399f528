"""Kinds are values: few lines test a config's class, and few files know a second kind's config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from tests.laws.source import PACKAGE, Module, imports, package_modules, parse

CLASS_TEST = re.compile(r"isinstance\([^)]*(?:Config|Spec)\b")
MOST_CLASS_TESTS = 9
# who may import the config of a kind besides its own room
ROOMS = {
    "SglangEngineConfig": "spmd_rl.rollout.sglang",
    "MegatronConfig": "spmd_rl.train.megatron",
}
KINDS = ("spmd_rl.rollout.kinds", "spmd_rl.train.kinds")
OF_A_FIELD = ("spmd_rl", "spmd_rl.train.config")  # where a union of configs is a field's type
# it makes a model of Megatron-core by itself, without a run
MAKES_ONE = ("spmd_rl.microscope.replay.backend_pass",)


def class_tests(files: Mapping[str, str]) -> Iterator[str]:
    """Yield each line that tests the class of a config or of a specification."""
    for name, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            if CLASS_TEST.search(line):
                yield f"{name}:{number}"


def known_outside(modules: Iterable[Module]) -> Iterator[str]:
    """Yield each import of a kind's config outside of its room, the kinds and recipes."""
    for module in modules:
        is_exempt = module.room == "recipes" or module.name in (*KINDS, *OF_A_FIELD, *MAKES_ONE)
        for item in imports(module):
            name = item.target.rpartition(".")[2]
            if name in ROOMS and not is_exempt and not module.name.startswith(ROOMS[name]):
                yield f"{module.name}:{item.line} imports {name}"


def test_few_lines_test_the_class_of_a_config() -> None:
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = sorted(class_tests(files))
    assert len(found) <= MOST_CLASS_TESTS, found


def test_configs_of_kinds_are_known_by_few() -> None:
    assert list(known_outside(package_modules())) == []


def test_a_planted_test_of_a_class_is_seen() -> None:
    planted = {
        "plan/axes.py": "x = 1\nif isinstance(cfg.engine, SglangEngineConfig):\n",
        "plan/roles.py": "if isinstance(self.cfg, TrainerConfig | FrozenConfig):\n",
        "rollout/kinds.py": "if isinstance(cfg, kind.config):\n",
    }
    assert list(class_tests(planted)) == ["plan/axes.py:2", "plan/roles.py:1"]


def test_a_planted_import_is_seen() -> None:
    sglang = "from spmd_rl.rollout.sglang.config import SglangEngineConfig\n"
    megatron = "def f():\n    from spmd_rl.train.megatron.config import KEY, MegatronConfig\n"
    planted = [
        parse("spmd_rl.plan.axes", sglang),
        parse("spmd_rl.rollout.sglang.engine", megatron),
        parse("spmd_rl.recipes.grpo", sglang),
        parse("spmd_rl.rollout.kinds", sglang),
    ]
    assert list(known_outside(planted)) == [
        "spmd_rl.plan.axes:1 imports SglangEngineConfig",
        "spmd_rl.rollout.sglang.engine:2 imports MegatronConfig",
    ]


def test_exempt_files_are_there() -> None:
    names = {module.name for module in package_modules()}
    assert names.issuperset((*KINDS, *OF_A_FIELD, *MAKES_ONE))

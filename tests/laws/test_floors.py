"""Rooms import downwards only, in no circle, and each heavy package has one room that imports it,
late.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from tests.laws.source import Module, imports, package_modules, parse

FLOORS = (
    {"errors", "types", "config", "mkl", "observe"},
    {"mesh", "offload", "kernels", "algo"},
    {"weights", "model", "data", "rewards"},
    {"controller"},
    {"hooks"},
    {"train", "rollout", "gateway"},
    {"evaluation", "environments"},
    {"cli", "recipes", "slurm", "check", "plan", "microscope", "report", "serve", "__main__", ""},
)
HEIGHT = {room: height for height, floor in enumerate(FLOORS) for room in floor}

HEAVY = {
    "starlette": "gateway",
    "uvicorn": "gateway",
    "transformers": "model",
    "matplotlib": "report",
    "rich": "report",
    "wandb": "observe",
    "tensorboard": "observe",
    "pyarrow": "data",
    "httpx": "rewards",
    "math_verify": "rewards",
    "sympy": "rewards",
    "langdetect": "rewards",
    "skyrl_gym": "environments",
    "omegaconf": "environments",
    "textarena": "environments",
    "verifiers": "environments",
    "websockets": "environments",
    "megatron": "train",
    "transformer_engine": "train",
    "triton": "kernels",
    "cupy": "kernels",
    "flash_attn": "kernels",
    "cutlass": "kernels",
    "quack": "kernels",
    "torch_memory_saver": "offload",
}
# decorators, base classes: such files come late
AT_MODULE_LEVEL = {"rich", "triton", "flash_attn", "cutlass", "quack"}
AT_MODULE_LEVEL |= {"starlette", "uvicorn", "verifiers"}
# a part of transformers that needs neither torch nor a model
LIGHT_PARTS = {"transformers.utils.chat_parsing": "gateway"}


def room_edges(modules: Iterable[Module]) -> Iterator[tuple[str, str, str]]:
    """(from room, to room, where) of every import between rooms that happens at run time."""
    for module in modules:
        for item in imports(module):
            if item.target.split(".")[0] == "spmd_rl" and not item.typing_only:
                parts = item.target.split(".")
                target = parts[1] if len(parts) > 1 and parts[1] in HEIGHT else ""
                if target != module.room:
                    yield module.room, target, f"{module.name}:{item.line} imports {item.target}"


def upward(modules: Iterable[Module]) -> list[str]:
    return [
        where for source, target, where in room_edges(modules) if HEIGHT[target] > HEIGHT[source]
    ]


def circle(modules: Iterable[Module]) -> list[str]:
    """The rooms that are left when those who import nobody left are taken away, again and again."""
    below: dict[str, set[str]] = {}
    for source, target, _ in room_edges(modules):
        below.setdefault(source, set()).add(target)
        below.setdefault(target, set())
    while free := [room for room, targets in below.items() if not targets]:
        below = {room: targets - set(free) for room, targets in below.items() if room not in free}
    return sorted(below)


def mutual(modules: Iterable[Module]) -> list[str]:
    """Pairs of files that import each other, late imports and those for types included."""
    by_name = {module.name: module for module in modules}
    below = {name: set(_imported_files(module, set(by_name))) for name, module in by_name.items()}
    return [f"{a} and {b}" for a in below for b in below[a] if a < b and a in below.get(b, ())]


def _imported_files(module: Module, names: set[str]) -> Iterator[str]:
    for item in imports(module):
        for target in (item.target, item.target.rpartition(".")[0]):
            if target in names and target != module.name:
                yield target
                break


def misplaced_heavy(modules: Iterable[Module]) -> list[str]:
    found = []
    for module in modules:
        for item in imports(module):
            package = item.target.split(".")[0]
            if package in HEAVY and not item.typing_only:
                late = item.lazy or package in AT_MODULE_LEVEL
                owners = {
                    room for part, room in LIGHT_PARTS.items() if item.target.startswith(part)
                }
                if module.room not in owners | {HEAVY[package]} or not late:
                    found.append(f"{module.name}:{item.line} imports {item.target}")
    return found


def test_every_room_has_a_floor() -> None:
    assert {module.room for module in package_modules()} <= set(HEIGHT)


def test_arrows_go_down() -> None:
    assert upward(package_modules()) == []


def test_rooms_form_no_circle() -> None:
    assert circle(package_modules()) == []


def test_no_file_imports_one_that_imports_it_back() -> None:
    assert mutual(package_modules()) == []


def test_heavy_packages_have_one_room_and_come_late() -> None:
    assert misplaced_heavy(package_modules()) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spmd_rl.algo.losses", "from spmd_rl.train import role"),
        ("spmd_rl.observe.run_folder", "def f():\n    import spmd_rl.mesh.role_context"),
        ("spmd_rl.data.files.files", "from spmd_rl import Prompts"),
    ],
)
def test_an_upward_arrow_is_seen(name: str, text: str) -> None:
    assert upward([parse(name, text)])


def test_a_circle_is_seen() -> None:
    one = parse("spmd_rl.mesh.world", "from spmd_rl.algo import losses")
    other = parse("spmd_rl.algo.losses", "from spmd_rl.mesh import world")
    assert circle([one]) == []
    assert circle([one, other]) == ["algo", "mesh"]


def test_files_that_import_each_other_are_seen() -> None:
    one = parse("spmd_rl.mesh.world", "def f():\n    from spmd_rl.mesh.split import Split")
    other = parse("spmd_rl.mesh.split", "from spmd_rl.mesh import world")
    assert mutual([one, other]) == ["spmd_rl.mesh.split and spmd_rl.mesh.world"]
    assert mutual([one]) == mutual([other]) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spmd_rl.train.trainer", "def f():\n    import transformers"),
        ("spmd_rl.gateway.replies", "def f():\n    import transformers"),
        ("spmd_rl.gateway.replies", "from transformers.utils.chat_parsing import ResponseParser"),
        ("spmd_rl.hooks.program", "import uvicorn"),
        ("spmd_rl.model.hf", "from transformers import AutoConfig"),
    ],
)
def test_a_misplaced_heavy_import_is_seen(name: str, text: str) -> None:
    assert misplaced_heavy([parse(name, text)])

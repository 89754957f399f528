"""Rooms import downwards only, rooms and files in no circle, and each heavy package has one room
that imports it, late.
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
IMPORT_DEPTH = 30  # files; lower it when you can
HEIGHT = {room: height for height, floor in enumerate(FLOORS) for room in floor}

HEAVY = {
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
AT_MODULE_LEVEL |= {"uvicorn", "verifiers"}
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


def imported_files(modules: Iterable[Module], *, lazy: bool) -> dict[str, set[str]]:
    """Return which files of `modules` each of them imports; late imports and those for types where
    `lazy`.
    """
    by_name = {module.name: module for module in modules}
    found: dict[str, set[str]] = {name: set() for name in by_name}
    for name, module in by_name.items():
        for item in imports(module):
            targets = item.target, item.target.rpartition(".")[0]
            target = next((one for one in targets if one in by_name), name)
            if target != name and (lazy or not (item.lazy or item.typing_only)):
                found[name].add(target)
    return found


def circles_of_files(modules: Iterable[Module]) -> list[list[str]]:
    """Sets of files that each import the others, directly or not. Source: Tarjan (1972)."""
    below = imported_files(modules, lazy=True)
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        path.append(name)
        for other in sorted(below[name]):
            if other not in numbers:
                visit(other)
            if other in path:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == numbers[name]:
            members = path[path.index(name) :]
            del path[path.index(name) :]
            if len(members) > 1:
                found.append(sorted(members))

    for name in below:
        if name not in numbers:
            visit(name)
    return found


def longest_chain(modules: Iterable[Module]) -> list[str]:
    """Return the longest chain of files of which each imports the next when it is imported."""
    below = imported_files(modules, lazy=False)
    chains: dict[str, list[str]] = {}

    def chain(name: str) -> list[str]:
        if name not in chains:
            chains[name] = [name, *max(map(chain, sorted(below[name])), key=len, default=[])]
        return chains[name]

    return max(map(chain, below), key=len)


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


def test_files_form_no_circle() -> None:
    assert circles_of_files(package_modules()) == []


def test_chains_of_imports_are_short() -> None:
    chain = longest_chain(package_modules())
    assert len(chain) <= IMPORT_DEPTH, chain


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


PLANTED_CIRCLE = (
    parse("spmd_rl.mesh.world", "def f():\n    from spmd_rl.mesh.split import Split"),
    parse("spmd_rl.mesh.split", "if TYPE_CHECKING:\n    from spmd_rl.mesh import axes"),
    parse("spmd_rl.mesh.axes", "from spmd_rl.mesh import world"),
)


def test_a_circle_of_three_files_is_seen() -> None:
    names = ["spmd_rl.mesh.axes", "spmd_rl.mesh.split", "spmd_rl.mesh.world"]
    assert circles_of_files(PLANTED_CIRCLE) == [names]
    assert circles_of_files(PLANTED_CIRCLE[:2]) == circles_of_files(PLANTED_CIRCLE[1:]) == []


def test_a_chain_counts_imports_at_module_level_alone() -> None:
    assert longest_chain(PLANTED_CIRCLE) == ["spmd_rl.mesh.axes", "spmd_rl.mesh.world"]


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

"""What can do harm has one owner, or none."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.laws.source import Module, calls, imports, package_modules, parse

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
# they unpickle what they read
PICKLING_MODULES = ("torch.distributed.checkpoint", "torch.serialization")
FORBIDDEN_CALLS = {"eval", "exec", "builtins.eval", "builtins.exec", "os.system"}
PICKLING_CALLS = (
    "pickle.",
    "torch.load",
    "torch.save",
    "torch.serialization.",
    "torch.distributed.checkpoint.",
)

OWNED_IMPORTS = {
    "uvicorn": {"gateway"},  # a socket that listens for HTTP
    "zmq": {"controller", "spmd_rl.rollout.sglang.client"},
    # what runs in a process that SGLang's packages come first in
    "sglang": {"spmd_rl.rollout.sglang.child_scheduler", "spmd_rl.microscope.foreign.sglang_dump"},
    "subprocess": {
        "check",
        "controller",
        "hooks",
        "observe",
        "report",
        "rewards",
        "rollout",
        "slurm",
    },
    "multiprocessing": {"controller", "rollout"},
}
OWNED_CALLS = {
    "init_process_group": {"mesh"},
    "new_group": {"mesh"},
    "DeviceMesh": {"mesh"},
    "init_device_mesh": {"mesh"},
    "all_gather_object": {"mesh"},
    "broadcast_object_list": {"mesh"},
    "fork": {"controller"},
    "execv": set(),
    "execvp": set(),
    "execvpe": set(),
}


def forbidden(modules: Iterable[Module]) -> list[str]:
    found = []
    for module in modules:
        for item in imports(module):
            pickles = item.target.startswith(PICKLING_MODULES) or item.target in (
                "torch.load",
                "torch.save",
            )
            if pickles or item.target.split(".")[0] in FORBIDDEN_IMPORTS:
                found.append(f"{module.name}:{item.line} imports {item.target}")
        for called, line in calls(module):
            if called in FORBIDDEN_CALLS or called.startswith(PICKLING_CALLS):
                found.append(f"{module.name}:{line} calls {called}")
    return found


def not_the_owner(modules: Iterable[Module]) -> list[str]:
    found = []
    for module in modules:
        for item in imports(module):
            owners = OWNED_IMPORTS.get(item.target.split(".")[0])
            if owners is not None and not {module.room, module.name} & owners:
                found.append(f"{module.name}:{item.line} imports {item.target}")
        for called, line in calls(module):
            owners = OWNED_CALLS.get(called.rpartition(".")[2])
            if owners is not None and module.room not in owners:
                found.append(f"{module.name}:{line} calls {called}")
    return found


def test_no_pickle_and_no_execution_of_text() -> None:
    assert forbidden(package_modules()) == []


def test_dangerous_things_stay_with_their_owner() -> None:
    assert not_the_owner(package_modules()) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "def f(x):\n    return eval(x)",
        "exec('1')",
        "torch.load('x')",
        "torch.save(x, 'x')",
        "from torch import load",
        "from torch.serialization import load",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed.checkpoint.filesystem import FileSystemReader",
        "from torch.distributed import checkpoint",
        "torch.distributed.checkpoint.load(x)",
    ],
)
def test_a_forbidden_thing_is_seen(text: str) -> None:
    assert forbidden([parse("spmd_rl.controller.channel.messages", text)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spmd_rl.rollout.rollout", "import zmq"),
        ("spmd_rl.rollout.sglang.sink", "import zmq"),
        ("spmd_rl.rollout.sglang.engine", "def f():\n    import sglang.srt.server_args"),
        ("spmd_rl.weights.executors", "dist.new_group([0, 1])"),
        ("spmd_rl.train.fsdp2.backend", "mesh = DeviceMesh('cpu', [0])"),
        ("spmd_rl.data.files.files", "import subprocess"),
        ("spmd_rl.hooks.program", "def f():\n    import uvicorn"),
    ],
)
def test_a_wrong_owner_is_seen(name: str, text: str) -> None:
    assert not_the_owner([parse(name, text)])

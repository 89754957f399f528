"""The channel is closed: no object travels as code, no text is run, every socket has its owner and
its key.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest

from tests.laws.source import Module, calls, functions, imports, package_modules, parse

# Ways in which a library would pickle behind our back, or take text for a program.
PICKLING = {
    "send_pyobj",
    "recv_pyobj",
    "all_gather_object",
    "broadcast_object_list",
    "scatter_object_list",
}
PICKLING |= {"gather_object", "send_object_list", "recv_object_list", "monkeypatch_pickle"}
RUNNING = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "run_path",
    "run_module",
    "literal_eval",
    "popen",
    "getoutput",
}
RUNNING_MODULES = {"runpy", "code", "codeop", "xmlrpc", "asyncore", "telnetlib"}
SAFE = {
    "shell": "False",
    "allow_pickle": "False",
    "trust_remote_code": "False",
    "weights_only": "True",
}
# lazy exports; commands; recipes, roles, functions; metric sinks; rewards
IMPORTERS = {"", "cli", "controller", "observe", "hooks"}

# Who makes a network socket, and who says where it listens.
SOCKETS = {"spmd_rl.controller.channel.router", "spmd_rl.controller.channel.dealer"}
LISTENERS = {
    "spmd_rl.controller.channel.router",
    "spmd_rl.controller.channel.zap",  # within the process
    "spmd_rl.controller.lifecycle.stack_server",
    "spmd_rl.gateway.http_server",  # the app asks for a key
}
# sockets of SGLang's own scheduler, which has no keys: files in a folder that no other user enters
IPC_ONLY = {"spmd_rl.rollout.sglang.client"}
DIALLERS = {
    "spmd_rl.controller.channel.dealer",
    "spmd_rl.controller.lifecycle.stack_server",
    "spmd_rl.check.facts",
}
CURVE = {"ROUTER": "curve_secretkey", "DEALER": "curve_serverkey"}


def text_as_program(modules: Iterable[Module]) -> list[str]:
    found = []
    for module in modules:
        for item in imports(module):
            if item.target.split(".")[0] in RUNNING_MODULES or item.target.startswith(
                "multiprocessing.connection"
            ):
                found.append(f"{module.name}:{item.line} imports {item.target}")
        for called, line in calls(module):
            owner, _, name = called.rpartition(".")
            runs = name in RUNNING and owner not in ("re", "torch", "triton", "cute")
            if (
                runs
                or name in PICKLING
                or (name == "import_module" and module.room not in IMPORTERS)
            ):
                found.append(f"{module.name}:{line} calls {called}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.keyword) and ast.unparse(node.value) != SAFE.get(
                node.arg or "", ast.unparse(node.value)
            ):
                found.append(f"{module.name}:{node.value.lineno} sets {node.arg}")
    return found


def open_sockets(modules: Iterable[Module]) -> list[str]:
    """Sockets that are made outside their owners, or without the key that encrypts them."""
    found = []
    for module in modules:
        for function in functions(module):
            text = ast.unparse(function)
            for kind in ("ROUTER", "DEALER", "PUB", "SUB", "PUSH", "PULL", "REQ", "PAIR", "STREAM"):
                if (
                    f"socket(zmq.{kind})" in text
                    and module.name not in IPC_ONLY
                    and (module.name not in SOCKETS or CURVE.get(kind, "?") not in text)
                ):
                    found.append(f"{module.name}:{function.lineno} {function.name} opens a {kind}")
        for called, line in calls(module):
            name = called.rpartition(".")[2]
            listens = name in ("bind", "bind_to_random_port") and module.name not in (
                LISTENERS | IPC_ONLY
            )
            dials = name in ("connect", "create_connection") and module.name not in DIALLERS
            if (listens or dials) and "." in called and "signature" not in called:
                found.append(f"{module.name}:{line} calls {called}")
        if module.name in IPC_ONLY:
            found += listens_beyond_files(module)
    return found


def listens_beyond_files(module: Module) -> list[str]:
    """Calls of `bind` whose address is not written as a file's."""
    return [
        f"{module.name}:{node.lineno} binds {ast.unparse(node.args[0])}"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(".bind")
        and not ast.unparse(node.args[0]).startswith("f'ipc://")
    ]


def test_no_object_travels_as_code_and_no_text_is_run() -> None:
    assert text_as_program(package_modules()) == []


def test_every_socket_has_its_owner_and_its_key() -> None:
    assert open_sockets(package_modules()) == []


@pytest.mark.parametrize(
    "text",
    [
        "socket.send_pyobj(x)",
        "dist.all_gather_object(a, b)",
        "import multiprocessing.connection",
        "importlib.import_module(name)",
        "compile(sample.text, '', 'exec')",
        "subprocess.run(text, shell=True)",
        "np.load(f, allow_pickle=True)",
        "torch.load(f, weights_only=False)",
        "AutoModel.from_pretrained(f, trust_remote_code=flag)",
    ],
)
def test_a_way_in_is_seen(text: str) -> None:
    assert text_as_program([parse("spmd_rl.train.trainer", text)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spmd_rl.controller.channel.router", "def f():\n    return context.socket(zmq.ROUTER)"),
        (
            "spmd_rl.rollout.rollout",
            "def f():\n    s = context.socket(zmq.DEALER)\n    s.curve_serverkey = key",
        ),
        ("spmd_rl.controller.channel.dealer", "def f():\n    return context.socket(zmq.PULL)"),
        ("spmd_rl.rollout.sglang.client", "sock.bind(f'tcp://{host}:0')"),
        ("spmd_rl.rollout.sglang.engine", "def f():\n    return context.socket(zmq.PULL)"),
        ("spmd_rl.report.live_view", "server.bind(('0.0.0.0', 80))"),
        ("spmd_rl.train.trainer", "line.connect('tcp://10.0.0.1:5')"),
    ],
)
def test_an_open_socket_is_seen(name: str, text: str) -> None:
    assert open_sockets([parse(name, text)])

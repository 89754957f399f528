"""Triton kernels run by its interpreter, without a GPU: for their results, not their speed.

Triton decides when it is imported whether to interpret, so this runs in a process of its own. It
imports both once, and forks for each file of calls, so that no constant of one is another's.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

ENDED = "ended with exit code {}\n"


class Calls(NamedTuple):
    """Calls of a module's function, and constants that are set before."""

    module: str
    function: str
    constants: dict[str, int]
    arguments: Sequence[tuple[Any, ...]]


def results(calls: Calls, folder: Path) -> list[Any]:
    """Return what the calls return. Blocks: for the process that runs them."""
    given, found = folder / "calls.pt", folder / "results.pt"
    torch.save(tuple(calls), given)
    _interpreter().run(given, found)
    return list(torch.load(found))


class _Interpreter:
    """A process that forks to run the calls of a file, until its stdin is closed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.kernels.interpreted"],
            env=os.environ | {"TRITON_INTERPRET": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.communicate)

    def run(self, given: Path, found: Path) -> None:
        """Run the calls in `given`, and write `found`. Raises: RuntimeError if they fail."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(given, found, sep="\t", file=self._process.stdin, flush=True)
        said = self._process.stdout.readline()
        if said != ENDED.format(0):
            raise RuntimeError(f"the interpreter of {given} {said or 'ended'}")


@functools.cache
def _interpreter() -> _Interpreter:
    return _Interpreter()


class _Kind(type):
    def __instancecheck__(cls, one: object) -> bool:
        return issubclass(type(one), builtins.int)


class _Int(builtins.int, metaclass=_Kind):
    """`int` that also takes a one-element array, which numpy 2.4 would refuse."""

    def __new__(cls, one: Any) -> Any:
        return one.item() if hasattr(one, "item") else builtins.int(one)


@triton.jit
def _exp(x):  # type: ignore[no-untyped-def]
    return tl.exp(x)


@triton.jit
def _added_now(a, b):  # type: ignore[no-untyped-def]
    return a + b


def _dot(builder: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
    """Multiply along one ascending chain over K, as numpy may sum by a row's position."""
    del builder, how
    sums = np.cumsum(a.data[:, :, None] * b.data, axis=1, dtype=d.data.dtype)
    return type(d)(d.data + sums[:, -1], d.dtype.scalar)


_ready: set[int] = set()


def _call(function: Any, *given: Any, **named: Any) -> Any:
    """Call a function from a kernel, without patching the language anew at each call."""
    from triton.runtime import interpreter

    names = function.fn.__globals__
    if id(names) not in _ready:
        interpreter._patch_lang(function.fn)
        _ready.add(id(names))
    return function.rewrite()(*given, **named)


def _prepare() -> None:
    """Supply what the interpreter lacks: CUDA's library, a driver for overlapping launches, PTX."""
    from triton.runtime import interpreter

    interpreter.int = _Int
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpretedFunction.__call__ = _call
    for name, one in sys.modules.items():
        if name.startswith("spmd_rl.kernels."):
            _replace(one, "overlapping", dict)
            _replace(one, "libdevice", SimpleNamespace(exp=_exp))
            _replace(one, "_added_now", _added_now)


def _replace(module: ModuleType, name: str, value: Any) -> None:
    if hasattr(module, name):
        setattr(module, name, value)


def run(given: str, found: str) -> None:
    """Run the calls in a file, and write what they return into another."""
    calls = Calls(*torch.load(given))
    module = importlib.import_module(calls.module)
    _prepare()
    for name, value in calls.constants.items():
        setattr(module, name, value)
    torch.save([getattr(module, calls.function)(*each) for each in calls.arguments], found)


def serve() -> None:
    """Run the calls of each pair of files that stdin names, in a process of their own."""
    for line in sys.stdin:
        child = multiprocessing.get_context("fork").Process(
            target=run, args=line.rstrip("\n").split("\t")
        )
        child.start()
        child.join()
        sys.stdout.write(ENDED.format(child.exitcode))
        sys.stdout.flush()


if __name__ == "__main__":
    serve()

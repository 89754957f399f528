"""Loading of hooks by name, with checks that run before anything starts."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from spmd_rl.config.likely import did_you_mean_path
from spmd_rl.controller.lifecycle.import_guard import importing
from spmd_rl.errors import ConfigError, source_line
from spmd_rl.rewards.answers.boxed import in_last_box
from spmd_rl.rewards.names import PACKAGES, find_grader, is_short_name


def load_function(kind: str, name: str) -> Callable[..., Any]:
    """Return the function that `package.module:function` or `path/to/file.py:function` names.

    `kind` names the setting in errors, such as "reward". A reward may have a short name, such as
    "math" (`rewards/names.py`).
    Raises: ConfigError that says what is wrong and how to fix it.
    """
    said = f"{kind} {name!r}"
    if kind == "reward" and is_short_name(name):
        return _load_grader(said, name)
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise ConfigError(
            f"{said}: write it as package.module:function or path/to/file.py:function"
        )
    module = (
        _import_file(said, Path(where)) if where.endswith(".py") else _import_module(said, where)
    )
    function = getattr(module, attribute, None)
    if function is None:
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        listed = ", ".join(functions) or "none"
        raise ConfigError(f"{said}: {where} has no {attribute!r} (its functions: {listed})")
    if not callable(function):
        raise ConfigError(f"{said}: it is a {type(function).__name__}, not a function")
    return function


def _load_grader(said: str, name: str) -> Callable[..., Any]:
    target, reads_box = find_grader(said, name)
    if package := PACKAGES.get(name):
        try:  # here, so that no call waits for it
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"{said}: it needs the package {package}: pip install -e '.[rewards]' in the "
                "repository of spmd_rl"
            ) from error
    function = load_function("reward", target)
    return in_last_box(function) if reads_box else function


def _import_module(said: str, module: str) -> ModuleType:
    with _importing(said):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not error.name or not f"{module}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(
                f"{said}: there is no module {module!r}: name a file instead "
                "(path/to/file.py:function), or start in the folder that holds the module"
            ) from error


def _import_file(said: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{said}: there is no file {path}{did_you_mean_path(path)}")
    key = f"hook_file_{path.resolve().as_posix().replace('/', '_').removesuffix('.py')}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        with _importing(said):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module


@contextmanager
def _importing(said: str) -> Iterator[None]:
    """Raise a ConfigError for whatever an import of the user's code raises."""
    try:
        with importing(said):
            yield
    except (ConfigError, KeyboardInterrupt):
        raise
    # the user's code may raise anything
    except BaseException as error:
        raised = f"{type(error).__name__}: {error}{source_line(error)}"
        raise ConfigError(f"{said}: importing it raised {raised}") from error

"""Recipe and its config, from the words of a command line."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from spmd_rl.config import foreign
from spmd_rl.config.likely import did_you_mean_path, likely_name
from spmd_rl.config.load import load
from spmd_rl.config.run import RunConfig
from spmd_rl.controller.lifecycle.import_guard import importing
from spmd_rl.errors import ConfigError, source_line

SHIPPED = "spmd_rl.recipes"


class CommandParser(argparse.ArgumentParser):
    """Reads the words of a command. Raises: ConfigError, which names the command."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


@dataclass(frozen=True)
class Invocation:
    """The parsed words of `spmd-rl run RECIPE [--config F.toml|RUN] [--nproc N] [--max-restarts N]
    [--verbose] [--a.b=c ...]`.
    """

    recipe: str
    config: Path | None
    nproc: int | None
    max_restarts: int
    verbose: bool
    overrides: list[str]

    @property
    def name(self) -> str:
        """The recipe's name without folders or packages: `grpo` of `recipes/grpo.py`."""
        if self.recipe.endswith(".py"):
            return Path(self.recipe).stem
        return self.recipe.rpartition(".")[2]

    @property
    def file(self) -> Path | None:
        """The file of settings, also where `config` is the folder of a run."""
        if self.config is not None and self.config.is_dir():
            return self.config / "config.toml"
        return self.config

    @classmethod
    def parse(cls, words: list[str]) -> Invocation:
        """Read the words after `run`. Raises: ConfigError."""
        parser = CommandParser("spmd-rl run", add_help=False, allow_abbrev=False)
        parser.add_argument("recipe")
        parser.add_argument("--config", type=Path)
        parser.add_argument("--nproc", type=int)
        parser.add_argument("--max-restarts", type=int, default=0)
        parser.add_argument("--verbose", action="store_true")
        flags, rest = parser.parse_known_args(words)
        require_counts(flags, {"nproc": 1, "max_restarts": 0})
        return cls(**vars(flags), overrides=overrides_of(rest))


@dataclass(frozen=True)
class Recipe:
    """A module's `Config` and `main(ctl, cfg)`, and its `check(cfg)` if it has one."""

    config: type[Any]
    main: Callable[..., None]
    check: Callable[[Any], None] | None

    def configure(self, invocation: Invocation) -> Any:
        """Return the config of an invocation; a run without a name gets the recipe's name.

        A config with a method `settled` has settings that follow from others, and returns itself
        with them.

        Raises: ConfigError.
        """
        from_file = getattr(self.config, "from_file", None)
        cfg = load(self.config, invocation.file, invocation.overrides, from_file)
        settled = getattr(cfg, "settled", None)
        cfg = cfg if settled is None else settled()
        run = run_config(cfg)
        if run is not getattr(cfg, "run", None) or run.name:
            return cfg
        return dataclasses.replace(cfg, run=dataclasses.replace(run, name=invocation.name))

    def accept(self, invocation: Invocation) -> Any:
        """Return the config, checked by the recipe.

        Raises: ConfigError, or what the recipe raises.
        """
        cfg = self.configure(invocation)
        if self.check is not None:
            self.check(cfg)
        return cfg


def run_config(cfg: object) -> RunConfig:
    """Return the `run` section of a recipe's config, or the defaults."""
    run = getattr(cfg, "run", None)
    return run if isinstance(run, RunConfig) else RunConfig()


def make_importable(recipe: str) -> str:
    """Return the module name of a recipe, and add its folder to `sys.path` if needed.

    A recipe is a path, a module or the name of a shipped recipe.

    Raises: ConfigError when there is no such recipe.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if recipe.endswith(".py"):
        path = Path(recipe).resolve()
        if not path.is_file():
            raise ConfigError(f"there is no recipe at {recipe}{did_you_mean_path(recipe)}")
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        return path.stem
    for name in (f"{SHIPPED}.{recipe}", recipe):
        if _exists(name):
            return name
    hint = _shipped_hint(recipe)
    raise ConfigError(f"there is no recipe '{recipe}': {hint} (a path must end in .py)")


def _shipped_hint(recipe: str) -> str:
    """Return a clause that names the shipped recipe most like `recipe`, else all of them."""
    shipped = shipped_recipes()
    if likely := likely_name(recipe, shipped):
        return f"did you mean {likely}?"
    return f"shipped ones are {', '.join(shipped) or 'none'}"


def load_recipe(recipe: str) -> Recipe:
    """Import a recipe. Raises: ConfigError when it is missing or is no recipe."""
    module = _import_module(recipe)
    _check_file(module, recipe)
    config, main = getattr(module, "Config", None), getattr(module, "main", None)
    if not dataclasses.is_dataclass(config) or not isinstance(config, type) or not callable(main):
        raise ConfigError(
            f"{recipe} is no recipe: it needs a dataclass Config and a function main(ctl, cfg)"
        )
    return Recipe(config, main, getattr(module, "check", None))


def _import_module(recipe: str) -> ModuleType:
    try:
        name = make_importable(recipe)
        with importing(recipe):
            return importlib.import_module(name)
    except SyntaxError as error:
        where, kind = f"{error.filename}:{error.lineno}", type(error).__name__
        raise ConfigError(f"{where}: {kind}: {error.msg}{source_line(error)}") from error
    except SystemExit as error:  # would end this process with exit code 0
        raise ConfigError(
            f"{recipe} is no recipe: importing it ends the process (sys.exit, {error})"
        ) from error


def _check_file(module: ModuleType, recipe: str) -> None:
    """Raises: ConfigError when Python found another module under the name of the recipe's file."""
    found = getattr(module, "__file__", None)
    if recipe.endswith(".py") and (
        found is None or Path(found).resolve() != Path(recipe).resolve()
    ):
        raise ConfigError(f"{recipe} has the name of another module, {found}: rename it")


def require_counts(flags: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Raises: ConfigError for a flag that is less than `least` says of it."""
    for name, minimum in least.items():
        count = getattr(flags, name)
        if count is not None and count < minimum:
            raise ConfigError(f"--{name.replace('_', '-')}={count}: expected {minimum} or more")


def shipped_recipes() -> list[str]:
    """Return the names of the package's recipes: its modules that have a Config."""
    package = importlib.import_module(SHIPPED)
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return [
        name for name in names if hasattr(importlib.import_module(f"{SHIPPED}.{name}"), "Config")
    ]


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def overrides_of(words: list[str]) -> list[str]:
    """Return `--a.b=c` and `--a.b c` as "a.b=c", and a flag without a value as "a.b=true"."""
    settings: list[str] = []
    for word in words:
        if word.startswith("--"):
            settings.append(word[2:])
        elif settings and "=" not in settings[-1]:
            settings[-1] += f"={word}"
        else:
            raise ConfigError(f"cannot read '{word}': settings are written --a.b=c{_written(word)}")
    return [setting if "=" in setting else f"{setting}=true" for setting in settings]


def _written(word: str) -> str:
    """Return the end of a sentence that says how to write a setting without dashes, as of hydra."""
    name, equals, value = word.lstrip("+").partition("=")
    if theirs := foreign.exact(name):
        return foreign.answer(theirs)
    return f", so write --{name}={value}" if equals else ""

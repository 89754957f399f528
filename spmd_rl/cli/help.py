"""What `--help` says, and what is said where words name no command or no recipe."""

from __future__ import annotations

import difflib
import inspect
import pkgutil
from collections.abc import Iterable

from spmd_rl import recipes
from spmd_rl.config.describe import describe
from spmd_rl.controller.run.recipe import load_recipe
from spmd_rl.errors import ConfigError

COMMANDS = {
    "run": ("RECIPE [--a.b=c ...]", "train on this machine"),
    "plan": ("RECIPE --world N", "what a run would be: split, groups, weight routes, memory"),
    "submit": ("RECIPE --nodes N ...", "the same run through Slurm"),
    "check": ("", "is this host fit for it"),
    "report": ("RUN [RUN ...]", "a page of curves and samples; several runs side by side"),
    "trace": ("RUN [RUN ...]", "a Chrome / Perfetto trace"),
    "rewind": ("RUN best|STEP", "let the run go on from an earlier checkpoint"),
    "export": ("RUN TARGET", "a checkpoint's weights as a Hugging Face folder"),
    "mismatch": ("RUN", "where engine and trainer part, down to layer and op"),
    "stacks": ("RUN", "where every process of the live run is"),
}
OVERVIEW = """\
usage: spmd-rl COMMAND ...

{commands}

RECIPE is a shipped name, a path to a .py file, or a module; RUN is the folder of a run. `spmd-rl COMMAND --help` says
more. On several machines without Slurm, each starts its ranks by

  torchrun --nproc-per-node N [--max-restarts N] -m spmd_rl run RECIPE ..."""

USAGE = "usage: spmd-rl run RECIPE [--config F.toml] [--nproc N] [--max-restarts N] [--verbose] [--a.b=c ...]"
RUN = """\
{usage}

  --config F.toml     settings as a file; those of the command line come on top
  --nproc N           ranks on this machine (default: one a GPU, else one)
  --max-restarts N    how often all ranks are started again when one fails (default: 0)
  --verbose           show the traceback of every error
  --a.b=c             a setting of the recipe, as `spmd-rl run RECIPE --help` lists them

RECIPE is a path to a .py file, a module, or one that is shipped:

{recipes}"""


def overview() -> str:
    """Every command in a line."""
    rows = ((f"{name} {words}", meaning) for name, (words, meaning) in COMMANDS.items())
    return OVERVIEW.format(commands=_table(rows))


def of_run() -> str:
    """The options of a run, and every shipped recipe in a line."""
    return RUN.format(usage=USAGE, recipes=_table(shipped().items()))


def of_recipe(recipe: str) -> str:
    """Every setting of a recipe. Raises: ConfigError when there is no such recipe."""
    keys = describe(load_recipe(recipe).config)
    return "\n".join(
        [
            USAGE,
            *(f"  --{key.name}={key.default}  ({key.type})  {key.doc}".rstrip() for key in keys),
        ]
    )


def shipped() -> dict[str, str]:
    """The shipped recipes' names, each with the first line of what it says of itself."""
    found = {}
    for module in pkgutil.iter_modules(recipes.__path__):
        try:
            recipe = load_recipe(module.name)
        except ConfigError:  # it is beside them, and none
            continue
        found[module.name] = (inspect.getdoc(inspect.getmodule(recipe.main)) or "").partition("\n")[
            0
        ]
    return found


def no_command(word: str) -> ConfigError:
    """What is said of a first word that is no command."""
    near = difflib.get_close_matches(word, COMMANDS, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    return ConfigError(f"spmd-rl has no command '{word}': {hint}")


def _table(rows: Iterable[tuple[str, str]]) -> str:
    found = list(rows)
    width = max(len(name) for name, _ in found) + 4
    return "\n".join(f"  {name:{width}}{meaning}" for name, meaning in found)

"""The commands of `spmd-rl`, and the texts that `--help` prints: usage, and a recipe's settings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from spmd_rl.config.describe import Key, describe
from spmd_rl.config.first import first_groups
from spmd_rl.config.likely import likely_name
from spmd_rl.controller.run.recipe import load_recipe, shipped_recipes
from spmd_rl.errors import ConfigError

HELP_ALL = "--help-all"
WITH_RECIPE = ("run", "plan", "submit", "check")  # commands whose first word is a recipe
HELP_FLAGS = {"--help", "-h", HELP_ALL}
PAGE = "docs/settings.md"
WIDTH = 100
NAMES_WIDTH = 38  # of a name and its default; a longer one moves its meaning to the right
TOP_LEVEL = "settings of the recipe"
CUT = " ..."
_CLAUSE_END = re.compile(r"; |: | \(")


class CommandEntry(NamedTuple):
    """One command: `module` has its `main(words)`, the other two are its line in the overview."""

    module: str
    arguments: str
    summary: str


COMMANDS = {
    "run": CommandEntry("spmd_rl.cli.command", "RECIPE [--a.b=c ...]", "train on this machine"),
    "plan": CommandEntry(
        "spmd_rl.plan.command",
        "RECIPE --world N",
        "what a run would be: split, groups, weight routes, memory",
    ),
    "submit": CommandEntry(
        "spmd_rl.slurm.command", "RECIPE --nodes N ...", "the same run through Slurm"
    ),
    "eval": CommandEntry(
        "spmd_rl.cli.command",
        "MODEL_OR_RUN [--data FILE]",
        "scores of a model, or of the newest checkpoint of a run: `run evaluate`",
    ),
    "serve": CommandEntry(
        "spmd_rl.serve.command",
        "MODEL_OR_RUN",
        "answer OpenAI's and Anthropic's clients from a model or a checkpoint",
    ),
    "check": CommandEntry(
        "spmd_rl.check.command", "[RECIPE ...]", "whether this host is fit for a run, and its input"
    ),
    "data": CommandEntry(
        "spmd_rl.cli.data.command",
        "convert|check|stats FILE ...",
        "logs of other programs as training data; what a data file holds",
    ),
    "report": CommandEntry(
        "spmd_rl.report.command",
        "RUN [RUN ...]",
        "a page of curves and samples; several runs side by side",
    ),
    "trace": CommandEntry(
        "spmd_rl.observe.command", "RUN [RUN ...]", "a Chrome / Perfetto trace of a run"
    ),
    "rewind": CommandEntry(
        "spmd_rl.controller.run.command",
        "RUN best|STEP",
        "let the run continue from an earlier checkpoint",
    ),
    "export": CommandEntry(
        "spmd_rl.train.command",
        "RUN TARGET",
        "the weights of a checkpoint as a Hugging Face folder",
    ),
    "mismatch": CommandEntry(
        "spmd_rl.microscope.command",
        "RUN",
        "where engine and trainer first differ, down to layer and op",
    ),
    "stacks": CommandEntry(
        "spmd_rl.controller.lifecycle.command",
        "RUN",
        "the Python stacks of every process of a live run",
    ),
    "completion": CommandEntry(
        "spmd_rl.cli.completion.command",
        "bash|zsh",
        "a script by which a shell completes commands, recipes and settings",
    ),
}
OVERVIEW = """\
usage: spmd-rl COMMAND ...

{commands}

RECIPE is a shipped name, a path to a .py file, or a module; RUN is the folder of a run.
`spmd-rl COMMAND --help` says more. On several machines without Slurm, each starts its ranks by

  torchrun --nproc-per-node N [--max-restarts N] -m spmd_rl run RECIPE ..."""

USAGE = (
    "usage: spmd-rl run RECIPE [--config F.toml] [--nproc N] [--max-restarts N] [--verbose] "
    "[--a.b=c ...]"
)
USAGE_OF_EVAL = (
    "usage: spmd-rl eval [MODEL_OR_RUN] [--data FILE] [--reward NAME] [--checkpoint PATH] "
    "[--config RUN|F.toml] [--a.b=c ...]\n\n"
    "  It takes the settings of a run and its newest checkpoint, unless --checkpoint names another."
    "\n  It is `spmd-rl run evaluate`, whose settings are these:"
)
RUN = """\
{usage}

  --config F.toml     settings as a file or a run's folder; the command line overrides them
  --nproc N           ranks on this machine (default: one for each GPU, else one)
  --max-restarts N    how often all ranks are restarted after one fails (default: 0)
  --verbose           show the traceback of every error
  --a.b=c             a setting of the recipe: `spmd-rl run RECIPE --help` lists those that people
                      change first, `spmd-rl run RECIPE --help-all` lists all

RECIPE is a path to a .py file, a module, or one that is shipped:

{recipes}"""


def starts_ranks(words: list[str]) -> bool:
    """Return whether these words of the command line launch a run."""
    return words[:1] == ["run"] and len(words) > 1 and not HELP_FLAGS & set(words)


def overview() -> str:
    """Return a line for every command."""
    rows = ((f"{name} {entry.arguments}", entry.summary) for name, entry in COMMANDS.items())
    return OVERVIEW.format(commands=_table(rows))


def of_run() -> str:
    """Return the options of `spmd-rl run`, and a line for every shipped recipe."""
    return RUN.format(usage=USAGE, recipes=_table(shipped().items()))


def of_eval(words: Collection[str]) -> str:
    """Return the usage of `spmd-rl eval`, and a line for each setting that `words` ask for."""
    return of_recipe("evaluate", words).replace(USAGE, USAGE_OF_EVAL)


def of_recipe(recipe: str, words: Collection[str] = ()) -> str:
    """Return a line for every setting that people change first, or for all after `--help-all`.

    Raises: ConfigError when there is no such recipe.
    """
    config = load_recipe(recipe).config
    return "\n".join([USAGE, *(all_lines(config) if HELP_ALL in words else first_lines(config))])


def shipped() -> dict[str, str]:
    """Return the first line of every shipped recipe's docstring, by the recipe's name."""
    modules = {name: inspect.getmodule(load_recipe(name).main) for name in shipped_recipes()}
    return {
        name: (inspect.getdoc(module) or "").partition("\n")[0] for name, module in modules.items()
    }


def no_command(word: str) -> ConfigError:
    """Return the error for a first word that is no command."""
    likely = likely_name(word, COMMANDS)
    hint = f"did you mean {likely}?" if likely else f"there are {', '.join(COMMANDS)}"
    return ConfigError(f"spmd-rl has no command '{word}': {hint}")


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = list(rows)
    width = max(len(left) for left, _ in lines) + 4
    return "\n".join(f"  {left:{width}}{right}" for left, right in lines)


def first_lines(config: type) -> list[str]:
    """Return the settings that people change first, each on one line, and where the others are."""
    groups = first_groups(config)
    lines = [
        line for title, keys in groups.items() for line in _block(title, map(short_line, keys))
    ]
    num_others = len({key.name for key in describe(config)}) - sum(map(len, groups.values()))
    others = (
        f"the other {num_others} settings too" if num_others else "these settings with their types"
    )
    return [*lines, "", f"--help-all lists {others}; those of shipped recipes are in {PAGE}."]


def all_lines(config: type, top: str = TOP_LEVEL) -> list[str]:
    """Return all settings with their types: those of the top level, then table by table.

    `top` is the title of the first.
    """
    tables: dict[str, list[Key]] = {top: []}
    for key in describe(config):
        table, dot, _ = key.name.partition(".")
        tables.setdefault(table if dot else top, []).append(key)
    return [
        line
        for title, keys in tables.items()
        if keys
        for line in _block(title, map(long_line, keys))
    ]


def short_line(key: Key) -> str:
    """Return name, default and the first words of a setting's comment, in `WIDTH` columns."""
    start = f"  --{key.name}={key.default}".ljust(NAMES_WIDTH)
    return f"{start}  {shortened(key.doc, WIDTH - len(start) - 2)}".rstrip()[:WIDTH]


def long_line(key: Key) -> str:
    """Return name, default, type and comment of a setting."""
    return f"  --{key.name}={key.default}  ({key.type})  {key.doc}".rstrip()


def shortened(text: str, room: int) -> str:
    """Return a text that has room: as many of its clauses as fit, else of its words."""
    if len(text) <= room:
        return text
    ends = [found.start() for found in _CLAUSE_END.finditer(text) if found.start() <= room]
    clauses = [text[:end] for end in ends if text[end] != ":" or ";" not in text[:end]]
    if clauses and " " in clauses[-1]:
        return clauses[-1]
    words = text[: max(room - len(CUT) + 1, 0)].rpartition(" ")[0]
    return f"{words}{CUT}" if words else ""


def _block(title: str, lines: Iterable[str]) -> list[str]:
    return ["", f"{title}:", *lines]

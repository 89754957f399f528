"""`spmd-rl completion`: a script by which bash or zsh completes commands, recipes and settings."""

from __future__ import annotations

from collections.abc import Iterable

from spmd_rl.cli.help import COMMANDS, HELP_ALL, WITH_RECIPE
from spmd_rl.config.describe import NAME, describe
from spmd_rl.config.likely import did_you_mean
from spmd_rl.controller.run.recipe import load_recipe, shipped_recipes
from spmd_rl.errors import ConfigError

USAGE = """\
usage: spmd-rl completion bash|zsh

Print a script that completes commands, recipes and settings. For every new shell:

  spmd-rl completion bash > ~/.spmd-rl.bash && echo '. ~/.spmd-rl.bash' >> ~/.bashrc
  spmd-rl completion zsh > ~/.spmd-rl.zsh && echo '. ~/.spmd-rl.zsh' >> ~/.zshrc

zsh needs its `compinit` before that line."""

WORDS = """\
# Made by `spmd-rl completion`. The arguments are the place of the word, the command and the recipe.
_spmd_rl_words() {{
    case $1:$2:$3 in
        1:*) echo "{commands}" ;;
        2:completion:*) echo "{shells}" ;;
{cases}
    esac
}}
"""
BASH = """\
_spmd_rl() {
    local words=$(_spmd_rl_words "$COMP_CWORD" "${COMP_WORDS[1]}" "${COMP_WORDS[2]}")
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
    if [[ ${COMPREPLY[0]} == *= ]]; then compopt -o nospace; fi
}
complete -o default -F _spmd_rl spmd-rl
"""
ZSH = """\
_spmd_rl() {
    local -a found=(${=$(_spmd_rl_words $((CURRENT - 1)) "$words[2]" "$words[3]")})
    compadd -S '' -- ${(M)found:#*=}
    compadd -- ${found:#*=}
    _files
}
compdef _spmd_rl spmd-rl
"""
SHELLS = {"bash": BASH, "zsh": ZSH}
FLAGS = ("--config", "--help", HELP_ALL)


def main(words: list[str]) -> int:
    """Print the script of the shell that `words` name. Raises: ConfigError for another shell."""
    if not words or words[0] in ("--help", "-h"):
        print(USAGE)
        return 0 if words else 2
    if words[0] not in SHELLS or words[1:]:
        hint = did_you_mean(words[0], SHELLS)
        raise ConfigError(f"spmd-rl completion {' '.join(words)}: expected bash or zsh{hint}")
    print(_words() + SHELLS[words[0]], end="")
    return 0


def _words() -> str:
    """Return the shell function that knows the words."""
    recipes = {name: _settings(load_recipe(name).config) for name in shipped_recipes()}
    commands = "|".join(WITH_RECIPE)
    cases = [
        _case(f"2:{commands}:*".replace("|", ":*|2:"), recipes),
        *(_case(f"*:*:{name}", own) for name, own in recipes.items()),
        _case("*:eval:*", recipes["evaluate"]),
    ]
    return WORDS.format(
        commands=" ".join(COMMANDS), shells=" ".join(SHELLS), cases="\n".join(cases)
    )


def _case(pattern: str, words: Iterable[str]) -> str:
    return f'        {pattern}) echo "{" ".join(words)}" ;;'


def _settings(config: type) -> list[str]:
    """Return the settings of a config as they begin on a command line, and the flags of a run.

    Those of a table by name, whose names are the user's, are left out.
    """
    keys = {key.name for key in describe(config) if f".{NAME}." not in f".{key.name}."}
    return [*FLAGS, *(f"--{key}=" for key in sorted(keys))]

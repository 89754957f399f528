"""`spmd-rl data`: convert logs of conversations, check a file of prompts, describe it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from spmd_rl.cli.data.inspect import (
    MAX_GRADED,
    Checked,
    check_records,
    describe_file,
    first_record,
    stats_lines,
)
from spmd_rl.cli.data.problems import problem_lines
from spmd_rl.cli.data.view import RECIPES, View, view_of
from spmd_rl.config.load import load
from spmd_rl.data.files.files import open_records
from spmd_rl.data.logs.convert import convert, write_rejects
from spmd_rl.data.logs.formats import FORMATS, OURS, READ, hint
from spmd_rl.data.prompt_records import PromptConfig
from spmd_rl.data.sft import split_note
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.signatures import load_reward
from spmd_rl.rewards.names import canonical_name


def main(words: list[str]) -> int:
    """Do what the first of `words` names, and return 1 where the data was refused."""
    parsers = _parsers()
    if words == ["--help"]:  # `spmd-rl data convert --help` arrives like this too
        print("\n".join(parser.format_help() for parser in parsers))
        return 0
    options, settings = parsers[0].parse_known_args(words)
    if options.action == "convert":
        if settings:
            raise ConfigError(f"spmd-rl data convert has no option {settings[0]}")
        return _convert(options)
    words = _settings(settings)
    if options.action == "check":
        return _check(options, words)
    stats = describe_file(options.path, load(PromptConfig, overrides=words), options.model)
    print(json.dumps(stats) if options.json else "\n".join(stats_lines(stats)))
    return 0


def _settings(words: list[str]) -> list[str]:
    """Return settings without the table's name. Raises: ConfigError for any other word."""
    for word in words:
        if not word.startswith("--prompts.") or "=" not in word:
            raise ConfigError(f"{word}: write a setting of the prompts as --prompts.KEY=VALUE")
    return [word.removeprefix("--prompts.") for word in words]


def _parsers() -> list[argparse.ArgumentParser]:
    """Return the parser of the command, and those of what it can do."""
    parser = argparse.ArgumentParser(prog="spmd-rl data", description=__doc__, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True)
    made = actions.add_parser("convert", help="conversations to another format", allow_abbrev=False)
    made.add_argument("source", metavar="IN", help="a data file")
    made.add_argument("target", metavar="OUT", help="the .jsonl file to write")
    made.add_argument("--from", dest="read", choices=READ, help="default: as the records look")
    made.add_argument(
        "--to", dest="write", choices=[*FORMATS], default=OURS, help=f"default: {OURS}"
    )
    made.add_argument("--force", action="store_true", help="replace OUT if it exists")
    made.add_argument("--strict", action="store_true", help="exit with 1 if a record was refused")
    made.add_argument("--rejects", metavar="FILE", help="write refused lines, with reasons")
    parsers = [parser, made]
    for name, text in (
        ("check", "all that a run would refuse; --prompts.KEY=VALUE as in the run"),
        ("stats", "what is in a file; --prompts.KEY=VALUE as in the run"),
    ):
        made = actions.add_parser(name, help=text, allow_abbrev=False)
        made.add_argument("path", metavar="PATH", help="a data file, or a slice PATH@[A:B]")
        made.add_argument("--model", metavar="FOLDER", help="count tokens with its tokenizer")
        made.add_argument("--json", action="store_true", help="print JSON")
        parsers.append(made)
        if name == "check":
            made.add_argument("--show", type=int, default=20, metavar="N", help="problems to print")
            made.add_argument("--recipe", choices=RECIPES, help="default: as records look")
            made.add_argument("--learn", choices=["all", "last"], help="as in a run of sft")
            made.add_argument(
                "--reward",
                action="append",
                default=[],
                metavar="NAME",
                help=f"a grader of the run, which must take the first {MAX_GRADED:,} records",
            )
    return parsers


def _convert(options: argparse.Namespace) -> int:
    source, target = Path(options.source), Path(options.target)
    rejects = Path(options.rejects) if options.rejects else None
    if rejects and rejects.resolve() in (source.resolve(), target.resolve()):
        raise ConfigError(f"--rejects {rejects}: name a file of its own")
    if rejects and rejects.exists() and not options.force:
        raise ConfigError(f"{rejects} exists: name another file, or replace it with --force")
    result = convert(source, target, options.read, options.write, force=options.force)
    if rejects:
        write_rejects(rejects, result.rejects)
    for item in result.rejects:
        print(item.reason)
    num_written = result.num_records - len(result.rejects)
    print(
        f"{num_written} of {result.num_records} records converted from {result.source} to "
        f"{options.write}, {len(result.rejects)} refused"
        + ("" if num_written else f"; {target} was not written")
    )
    return 1 if not num_written or (options.strict and result.rejects) else 0


def _check(options: argparse.Namespace, settings: list[str]) -> int:
    records = open_records(options.path)
    first = first_record(records)
    view = view_of(options.recipe, settings, options.learn, first)
    rewards = [*map(canonical_name, options.reward)]
    for name in rewards:
        load_reward(name)
    found = check_records(records, view, options.model, rewards)
    if options.json:
        print(
            json.dumps(
                {
                    "recipe": view.recipe,
                    "settings": _words(view.deduced),
                    "records": found.num_records,
                    "dropped": found.num_dropped,
                    "problems": [str(problem) for problem in found.problems],
                    "notes": found.notes,
                }
            )
        )
    else:
        print("\n".join(_lines(options, view, found)))
        if found.problems and first and (sentence := hint(options.path, first.row)):
            print(sentence)
    return 1 if found.problems else 0


def _lines(options: argparse.Namespace, view: View, found: Checked) -> Iterator[str]:
    """Yield what a check prints: the view that it took, the problems, and how many there are."""
    yield f"{options.path} is checked as {view.recipe} reads it"
    if view.deduced:
        yield f"give that run {' '.join(_words(view.deduced))}"
    yield from problem_lines(found.problems, found.num_records, view.cfg, options.show)
    if found.num_dropped:
        yield f"{found.num_dropped} records {found.defect}: the run leaves them out"
    if found.num_split:
        num_sound = found.num_records - len(found.problems) - found.num_dropped
        note = split_note(found.num_split, num_sound, found.num_sequences)
        yield f"{options.path}: {note}"
    yield from found.notes
    if not options.model:
        yield "--model FOLDER also checks lengths and the chat template"
    summary = f"{found.num_records} records, {len(found.problems)} problems"
    graded = options.reward or getattr(view.cfg, "reward_key", "")
    if graded and found.num_records > MAX_GRADED:
        summary += f"; graders were asked about the first {MAX_GRADED:,} records"
    yield summary


def _words(settings: list[str]) -> list[str]:
    """Return settings as a run takes them."""
    return [f"--prompts.{word}" for word in settings]

"""Options of `spmd-rl mismatch`: the command line, and which options go together."""

from __future__ import annotations

import argparse
import json
from typing import Any, NoReturn

import torch

from spmd_rl.errors import ConfigError
from spmd_rl.microscope.diagnose.faults import FAULTS
from spmd_rl.microscope.sides import DUMP, FOREIGN, MEGATRON, PASSES, SGLANG


class _MismatchParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"spmd-rl mismatch: {message}")


def parse_options(words: list[str], description: str | None) -> argparse.Namespace:
    """Return the options. `left` is None unless it is given.

    Raises: ConfigError for options that make no sense, alone or together.
    """
    options = _parser(description).parse_args(words)
    _check_inputs(options)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here")
    if options.sglang_options is not None:
        options.sglang_options = _json_object(options.sglang_options)
    return options


def check_sides(options: argparse.Namespace) -> None:
    """Raises: ConfigError unless the two sides can be compared; both are known by now."""
    sides = (options.left, options.right)
    if sides[0] == sides[1]:
        raise ConfigError(
            f"--left and --right are both '{options.left}': choose two different ones"
        )
    if options.plant and options.left != "engine":
        raise ConfigError("--plant needs --left engine: a fault is planted in the engine")
    if all(side in FOREIGN for side in sides):
        raise ConfigError(
            f"--left {sides[0]} and --right {sides[1]} both run elsewhere: choose engine, trainer "
            "or transformers as one of them, which then runs each op on the other's input"
        )
    if MEGATRON in sides and any(side in FOREIGN for side in sides):
        raise ConfigError(
            f"--left {sides[0]} and --right {sides[1]} both keep their weights to themselves: "
            "choose engine, trainer or transformers beside them"
        )
    if (DUMP in sides) != bool(options.dump):
        raise ConfigError("--right dump and --dump FILE go together: the file holds that side")
    if options.sglang_options and not any(side in SGLANG for side in sides):
        raise ConfigError("--sglang-options need --right sglang or --right sglang-deterministic")


def _check_inputs(options: argparse.Namespace) -> None:
    """Raises: ConfigError unless it is clear what is to be replayed."""
    if options.model is None and options.run is None:
        raise ConfigError("name the folder of a run, or a model with --model and --prompts")
    if options.prompts and (options.samples or options.step is not None):
        raise ConfigError(
            "--prompts are replayed instead of samples: leave out --samples and --step"
        )
    if not (options.prompts or options.run):
        raise ConfigError("--model needs --prompts, or the folder of a run whose samples to replay")
    if options.tolerance is not None and not 0 <= options.tolerance < 1:
        raise ConfigError("--tolerance is a share of a row's largest output: from 0 to below 1")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--sglang-options is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("--sglang-options is not a JSON object")
    return value


def _parser(description: str | None) -> _MismatchParser:
    parser = _MismatchParser(prog="spmd-rl mismatch", description=description, allow_abbrev=False)
    _add_inputs(parser)
    _add_sides(parser)
    parser.add_argument("--plant", choices=tuple(FAULTS), help="plant a fault in the engine")
    parser.add_argument("--out", metavar="DIR", help="default: RUN/mismatch")
    return parser


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", help="folder of a run, with samples/ and hf/")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="samples of this step, and the weights that drew them, if a checkpoint has them",
    )
    parser.add_argument(
        "--samples",
        default="",
        metavar="UID:INDEX,...",
        help="default: one of each of the last step's first 8 prompts",
    )
    parser.add_argument(
        "--model", metavar="PATH", help="a Hugging Face folder; default: the run's hf/"
    )
    parser.add_argument(
        "--prompts", nargs="+", metavar="TEXT", help="replay these texts instead of samples"
    )
    parser.add_argument(
        "--write-inputs",
        metavar="FILE",
        help="write the tokens for a program that makes a dump, and compare nothing",
    )


def _add_sides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--left", choices=PASSES, help="default: engine; for a run of SGLang, name one"
    )
    parser.add_argument("--right", choices=PASSES, default="trainer")
    parser.add_argument(
        "--dump", metavar="FILE", help="hidden states that another program wrote (docs/mismatch.md)"
    )
    parser.add_argument(
        "--sglang",
        metavar="PYTHON",
        help="the interpreter of SGLang, or a folder that it was installed into; "
        "default: this interpreter",
    )
    parser.add_argument(
        "--sglang-options",
        metavar="JSON",
        help="SGLang's own options, by the names of its ServerArgs; default: none",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="count differences on the same input as rounding up to this share of a row's largest "
        "output; default: what the dtype rounds for dump and sglang, nothing for others",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="default: each role's in the run, or bfloat16 on GPUs",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")

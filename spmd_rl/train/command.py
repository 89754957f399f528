"""`spmd-rl export`: write the weights of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.low_precision.block_codes import torch_dtype
from spmd_rl.model.formats.folders import file_formats
from spmd_rl.train.checkpoint.export import MERGED_NOTE, export_saved
from spmd_rl.train.checkpoint.model_card import write_card
from spmd_rl.train.checkpoint.saved_run import (
    checkpoint_of,
    model_of,
    random_seed,
    settings_of,
    trainer_of,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16} | {
    one.name: torch_dtype(one.code_dtype) for one in file_formats().values()
}


def main(words: list[str]) -> int:
    """Write the weights of a run's checkpoint, as `words` ask, and print where they are."""
    options = _options(words)
    target = Path(options.target)
    if target.exists():
        raise ConfigError(f"{target} exists: name a folder that does not")
    run = Path(options.run)
    folder = trainer_of(checkpoint_of(run, options.step), options.role)
    model = model_of(run, options.model)
    export_saved(
        folder,
        model,
        target,
        DTYPES[options.dtype],
        merge=options.merge,
        seed=random_seed(settings_of(run)),
    )
    note = MERGED_NOTE if options.merge else ""
    step = int(folder.parent.name.removeprefix("step_"))
    write_card(target, run, str(model), step, note)
    print(f"{target} holds the weights of {folder}")
    return 0


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="spmd-rl export", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("target", metavar="TARGET", help="the folder to write")
    parser.add_argument(
        "--step", help="export the checkpoint after this step, or `best` (default: the newest)"
    )
    parser.add_argument("--role", help="the trainer to export, where a checkpoint holds several")
    parser.add_argument(
        "--dtype",
        choices=[*DTYPES],
        default="float32",
        help="default: float32; e4m3 is the block-FP8 layout that SGLang and vLLM read",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="merge adapters into the weights of their base (default: a folder that peft loads)",
    )
    parser.add_argument(
        "--model", help="where config and tokenizer come from (default: the model of the run)"
    )
    return parser.parse_args(words)

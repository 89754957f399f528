"""`spmd-rl mismatch`: replay, compare, say what was found, and leave a page and a JSON."""

from __future__ import annotations

import argparse
from pathlib import Path as Folder
from typing import Any, NoReturn

import torch

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.contract import dtype_of
from spmd_rl.kernels.flash import flash_takes
from spmd_rl.microscope import inputs
from spmd_rl.microscope.case import Case
from spmd_rl.microscope.engine_path import EnginePath
from spmd_rl.microscope.faults import FAULTS, plant
from spmd_rl.microscope.paths import Path, ReferencePath, TrainerPath, load_model
from spmd_rl.microscope.report import Replay, examine, write
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.engine import EngineConfig

PATHS = ("engine", "trainer", "transformers")
SPLIT = "attention_split"
ENGINE_KEYS = ("page_size", "num_pages", "max_batch", "max_step_tokens", "prefix_cache", "cuda_graphs", SPLIT)
TRAINER_KEYS = ("max_tokens", "logit_rows", SPLIT)
AGREE, PART = 0, 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"spmd-rl mismatch: {message}")


def main(words: list[str]) -> int:
    """`spmd-rl mismatch`: exit code 0 when all bits agree and every sequence reads its own history, 1 when not, 2 for
    bad input."""
    options = _parser().parse_args(words)
    if options.left == options.right:
        raise ConfigError(f"both paths are '{options.left}': choose two different ones")
    if options.plant and options.left != "engine":
        raise ConfigError("a fault is planted in the engine's path: say --left engine")
    run = Folder(options.run) if options.run else None
    settings = inputs.run_settings(run) if run else {}
    if options.model is None and run is None:
        raise ConfigError("name the folder of a run, or a model with --model and --prompts")
    model = Folder(options.model) if options.model else inputs.run_model(run or Folder())
    case = _case(options, run, model, settings)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    names = options.left, options.right
    dtypes = {
        name: _dtype(name, other, options.dtype, device, settings)
        for name, other in zip(names, names[::-1], strict=True)
    }
    if drop_splits(settings, ModelSpec.from_folder(model).head_dim, dtypes[options.left], device):
        print("the run's attention_split needs FlashAttention-4: both paths attend to all keys at once here")
    left, right = (_path(name, model, dtypes[name], device, settings) for name in names)
    if options.plant:
        assert isinstance(left, EnginePath)
        plant(options.plant, left)
    replay = Replay(case, left, right, model=str(model), planted=options.plant)
    found = examine(replay)
    page = write(found, Folder(options.out) if options.out else (run or Folder()) / "mismatch")
    print(found.verdict)
    agree = not (found.comparison.findings or found.comparison.troubles)
    if run and agree and "transformers" not in names and (counted := inputs.mismatched_tokens(run)):
        types = " and ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes.values()))
        where = f"on {device.type} in {types} under the weights in {model}"
        print(
            f"But the run itself counted {counted:,} unequal tokens. This is another process, {where}: what differs "
            "from the run in these, or a push, is to blame."
        )
    print(page)
    return AGREE if agree else PART


def drop_splits(settings: dict[str, Any], head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Take attention in splits out of a run's settings where it cannot run; returns whether there was any."""
    if flash_takes(head_dim, dtype, device):
        return False
    dropped = [role.pop(SPLIT, 0) for role in (settings.get("engine", {}), settings.get("trainer", {}))]
    return any(dropped)


def _case(options: argparse.Namespace, run: Folder | None, model: Folder, settings: dict[str, Any]) -> Case:
    if options.prompts:
        return inputs.prompts_given(options.prompts, model)
    if run is None:
        raise ConfigError("--model needs --prompts, or the folder of a run whose samples to replay")
    wanted = [name.strip() for name in options.samples.split(",")] if options.samples else []
    return inputs.samples_of_run(run, model, settings, wanted)


def _dtype(name: str, other: str, asked: str | None, device: torch.device, settings: dict[str, Any]) -> torch.dtype:
    """That of the role in the run; `transformers` takes that of the other side."""
    role = other if name == "transformers" else name
    dtype: torch.dtype = getattr(torch, dtype_of(asked or settings.get(role, {}).get("dtype", "auto"), device))
    return dtype


def _path(name: str, model: Folder, dtype: torch.dtype, device: torch.device, settings: dict[str, Any]) -> Path:
    if name == "transformers":
        return ReferencePath(model, dtype, device)
    engine, trainer = settings.get("engine", {}), settings.get("trainer", {})
    network = load_model(model, dtype, device)
    if name == "engine":
        return EnginePath(network, EngineConfig(**{key: engine[key] for key in ENGINE_KEYS if key in engine}))
    return TrainerPath(network, **{key: trainer[key] for key in TRAINER_KEYS if key in trainer})


def _parser() -> _Parser:
    parser = _Parser(prog="spmd-rl mismatch", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("run", nargs="?", help="folder of a run, with samples/ and hf/")
    parser.add_argument("--samples", default="", metavar="UID:INDEX,...", help="default: the first of the last step")
    parser.add_argument("--left", choices=PATHS, default="engine")
    parser.add_argument("--right", choices=PATHS, default="trainer")
    parser.add_argument("--model", metavar="PATH", help="a Hugging Face folder; default: the run's hf/")
    parser.add_argument("--prompts", nargs="+", metavar="TEXT", help="replay these instead of samples")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: each role's in the run, or bfloat16 on GPUs"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    parser.add_argument("--plant", choices=tuple(FAULTS), help="plant a fault in the engine's path")
    parser.add_argument("--out", metavar="DIR", help="default: RUN/mismatch")
    return parser
